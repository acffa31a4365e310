-- Take the lock on this node, or say who has it. Safe to repeat with the same token.
-- KEYS  1 lease  2 retired tokens (zset: token by its end)  3 last fencing number
-- ARGV  1 token (26 bytes)  2 ttl in ms  3 holder  4 proposed fencing number
--       5 mode  new: a number above all that this node knows; the proposed one, if it is
--               keep: exactly this number, which a majority has or will get
-- reply fencing number: granted for the ttl | -1 this token was retired | {ms the lease has left, lease} taken
--       | error NEWER: the lease has a larger format
-- A lease is "1 token state number holder": 1 is the format, a number is 16 digits.
local token, ttl, proposed, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), ARGV[5] == 'keep'

-- What something else wrote counts as 0, and so does a number that doubles do not distinguish from the next one.
local function counted(value)
  local number = string.match(value or '', '^%d+$') and tonumber(value)
  return number and number < 2^53 and number or 0
end

local lease = redis.call('GET', KEYS[1])
local head = '1 ' .. token .. ' '
local mine = lease and string.sub(lease, 1, 29) == head

if lease and string.find(lease, '^[2-9] ') then return {err = 'NEWER written by a newer version'} end
if lease and not mine then return {redis.call('PTTL', KEYS[1]), lease} end
if mine and string.sub(lease, 30, 30) == 'r' then return -1 end
if mine and not keep then
  -- The holder is written each time, because another process may have adopted the lease.
  ttl = math.max(ttl, redis.call('PTTL', KEYS[1]))
  redis.call('SET', KEYS[1], string.sub(lease, 1, 48) .. ARGV[3], 'PX', ttl)
  return tonumber(string.sub(lease, 32, 47))
end
if not mine and redis.call('ZSCORE', KEYS[2], token) then return -1 end

local last = counted(redis.call('GET', KEYS[3]))
local fence = proposed
if not keep and fence <= last then fence = last + 1 end
local number = string.format('%016.0f', fence)
if fence > last then redis.call('SET', KEYS[3], number) end
if mine then ttl = math.max(ttl, redis.call('PTTL', KEYS[1])) end
redis.call('SET', KEYS[1], head .. 'h ' .. number .. ' ' .. ARGV[3], 'PX', ttl)
return fence
