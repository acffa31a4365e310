-- Extend a lease in another slot than the first, but never shorten it, as renew.lua does for the first slot.
-- KEYS  1 leases in the other slots (zset: by their end)
-- ARGV  1 token  2 ttl in ms  3 holder
-- reply 1 renewed | 0 the token does not hold the lock | error NEWER: the lease has a larger format
-- Leases: see lock.lua
local mine, found = '1 ' .. ARGV[1] .. ' ', redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
local is_newer = false -- whether any of the others is; they do not matter if its own lease is found
for i = 1, #found, 2 do
  local value, ends = found[i], tonumber(found[i + 1])
  local state = string.sub(value, 1, 29) == mine and string.sub(value, 30, 30)
  if state == 'h' or (state == 'c' and ARGV[3]) then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    if ends <= now then return 0 end
    if state == 'c' then
      redis.call('ZREM', KEYS[1], value)
      value = string.sub(value, 1, 29) .. 'h' .. string.sub(value, 31, 53) .. ARGV[3]
    end
    ends = math.max(ends, now + ARGV[2])
    redis.call('ZADD', KEYS[1], ends, value)
    redis.call('PEXPIREAT', KEYS[1], math.ceil(math.max(ends, found[#found])))
    return 1
  end
  is_newer = is_newer or string.find(value, '^[2-9] ')
end
return is_newer and {err = 'NEWER written by a newer version'} or 0
