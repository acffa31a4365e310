-- Extend a lease, but never shorten it, because a duplicate of this command may come late.
-- KEYS  1 lease
-- ARGV  1 token  2 ttl in ms
--       3 holder: given by a waiter that took its lease by the message, and so takes it here if it had not yet
-- reply 1 renewed | 0 the token does not hold the lock | error NEWER: the lease has a larger format
local lease = redis.call('GETRANGE', KEYS[1], 0, ARGV[3] and 46 or 29)
if string.find(lease, '^[2-9] ') then return {err = 'NEWER written by a newer version'} end
local state = string.sub(lease, 1, 29) == '1 ' .. ARGV[1] .. ' ' and string.sub(lease, 30, 30)
if state == 'c' and ARGV[3] then
  local taken, ttl = string.sub(lease, 1, 29) .. 'h' .. string.sub(lease, 31) .. ' ' .. ARGV[3], tonumber(ARGV[2])
  redis.call('SET', KEYS[1], taken, 'PX', math.max(ttl, redis.call('PTTL', KEYS[1])))
  return 1
end
if state ~= 'h' then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
