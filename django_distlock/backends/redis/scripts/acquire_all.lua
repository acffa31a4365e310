-- Grant several free locks in their first slots, or none of them. Safe to repeat with the same tokens.
-- The part between "for each lock" and "end of each lock" is repeated for each lock, with the next five keys and three
-- arguments, because a proxy of a managed service must read which keys a script names.
-- KEYS  of each lock: see lock.lua
-- ARGV  of each lock: 1 token (26 bytes)  2 holder  3 ttl in ms
-- reply fencing numbers | 0 a lock is not free, or others wait for it; then nothing was written

-- include lock.lua

local fences = {} -- of the leases, by token
local last = {} -- number, by the key of its counter, which several locks may share

-- for each lock
do
  local value = redis.call('GET', KEYS[1])
  if value and string.sub(value, 1, 30) == '1 ' .. ARGV[1] .. ' h' then
    fences[ARGV[1]] = string.sub(value, 32, 47) -- a repeat
  else
    local ends = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')[2]
    if value or redis.call('EXISTS', KEYS[2]) == 1 or redis.call('ZSCORE', KEYS[3], ARGV[1])
        or ends and tonumber(ends) > ms() then
      return 0
    end
  end
  last[KEYS[4]] = counted(redis.call('GET', KEYS[4]))
end
-- end of each lock

local granted = {}

-- for each lock
do
  local ttl = tonumber(ARGV[3])
  if fences[ARGV[1]] then
    ttl = math.max(ttl, redis.call('PTTL', KEYS[1])) -- a late duplicate must not shorten it
  else
    last[KEYS[4]] = math.max(us(), last[KEYS[4]] + 1)
    fences[ARGV[1]] = string.format('%016.0f', last[KEYS[4]])
    redis.call('SET', KEYS[4], fences[ARGV[1]])
  end
  redis.call('SET', KEYS[1], '1 ' .. ARGV[1] .. ' h ' .. fences[ARGV[1]] .. ' ' .. ARGV[2], 'PX', ttl)
  table.insert(granted, tonumber(fences[ARGV[1]]))
end
-- end of each lock

return granted
