-- Included by release.lua and exchange.lua, after lock.lua.

local function retire(token, length) -- for so many ms, because a command that carries it may still arrive
  if length == 0 then return end
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ms())
  redis.call('ZADD', KEYS[3], 'GT', ms() + length, token)
  if redis.call('PTTL', KEYS[3]) < length then redis.call('PEXPIRE', KEYS[3], length) end
end
