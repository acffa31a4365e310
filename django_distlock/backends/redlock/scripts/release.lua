-- Give up a lease, or a request for one, on this node. Safe to repeat.
-- KEYS  1 lease  2 retired tokens (zset: token by its end)
-- ARGV  1 token  2 cooldown in ms: how long the lock stays taken (0 = given up at once)
--       3 ms for which the token is retired, because a command that carries it may still arrive (0 = none can)
--       4 1 = an operator frees the lock even in its cooldown; else 0
-- reply 1 released | 0 the token did not hold the lock here | error NEWER: the lease has a larger format
local token, cooldown, retire = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local head = redis.call('GETRANGE', KEYS[1], 0, 29)
if string.find(head, '^[2-9] ') then return {err = 'NEWER written by a newer version'} end

if retire > 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('ZADD', KEYS[2], 'GT', now + retire, token)
  if redis.call('PTTL', KEYS[2]) < retire then redis.call('PEXPIRE', KEYS[2], retire) end
end

if string.sub(head, 1, 29) ~= '1 ' .. token .. ' ' then return 0 end
if string.sub(head, 30, 30) == 'r' and ARGV[4] ~= '1' then return 1 end
if cooldown > 0 then
  redis.call('SETRANGE', KEYS[1], 29, 'r')
  redis.call('PEXPIRE', KEYS[1], cooldown)
else
  redis.call('DEL', KEYS[1])
end
return 1
