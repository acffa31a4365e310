-- Extend a lease on this node, but never shorten it, because a duplicate of this command may come late.
-- KEYS  1 lease
-- ARGV  1 token  2 ttl in ms
-- reply its fencing number (16 digits) | 0 the token does not hold the lock here | error NEWER: the lease has a larger format
local head = redis.call('GETRANGE', KEYS[1], 0, 46)
if string.find(head, '^[2-9] ') then return {err = 'NEWER written by a newer version'} end
if string.sub(head, 1, 30) ~= '1 ' .. ARGV[1] .. ' h' then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return string.sub(head, 32, 47)
