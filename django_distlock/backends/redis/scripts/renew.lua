-- Extend a lease, but never shorten it, because a duplicate of this command may come late.
-- KEYS  1 lease
-- ARGV  1 token  2 ttl in ms
-- reply 1 renewed | 0 the token does not hold the lock | error NEWER: the lease has a larger format
local lease = redis.call('GETRANGE', KEYS[1], 0, 29)
if string.find(lease, '^[2-9] ') then return {err = 'NEWER written by a newer version'} end
if lease ~= '1 ' .. ARGV[1] .. ' h' then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
