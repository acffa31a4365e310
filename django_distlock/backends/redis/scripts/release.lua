-- Give up a lease, or a request whose outcome is not known. Safe to repeat.
-- KEYS  1 lease  2 retired tokens (set)
-- ARGV  1 token  2 rest in ms: how long the lock stays taken (0 = free at once)
--       3 ms for which the token is retired, because a command that carries it may still arrive (0 = none can)
-- reply 1 released | 0 the token did not hold the lock
local token, rest, retire = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if retire > 0 then
  redis.call('SADD', KEYS[2], token)
  if redis.call('PTTL', KEYS[2]) < retire then redis.call('PEXPIRE', KEYS[2], retire) end
end
local lease = redis.call('GETRANGE', KEYS[1], 0, 27)
if lease == token .. ' r' then return 1 end
if lease ~= token .. ' h' then return 0 end
if rest > 0 then
  redis.call('SETRANGE', KEYS[1], 27, 'r')
  redis.call('PEXPIRE', KEYS[1], rest)
else
  redis.call('DEL', KEYS[1])
end
return 1
