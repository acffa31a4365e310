-- Give up a lease, or a request for one, on this node. Safe to repeat.
-- KEYS  1 lease  2 retired tokens (zset: token by its end)
-- ARGV  1 token  2 rest in ms: how long the lock stays taken (0 = given up at once, below 0 = even if it rests)
--       3 ms for which the token is retired, because a command that carries it may still arrive (0 = none can)
-- reply 1 released | 0 the token did not hold the lock here
local token, rest, retire = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local LEASE, RETIRED = KEYS[1], KEYS[2]

if retire > 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', RETIRED, '-inf', now)
  redis.call('ZADD', RETIRED, 'GT', now + retire, token)
  if redis.call('PTTL', RETIRED) < retire then redis.call('PEXPIRE', RETIRED, retire) end
end

local head = redis.call('GETRANGE', LEASE, 0, 27)
if string.sub(head, 1, 27) ~= token .. ' ' then return 0 end
if string.sub(head, 28, 28) == 'r' and rest >= 0 then return 1 end
if rest > 0 then
  redis.call('SETRANGE', LEASE, 27, 'r')
  redis.call('PEXPIRE', LEASE, rest)
else
  redis.call('DEL', LEASE)
end
return 1
