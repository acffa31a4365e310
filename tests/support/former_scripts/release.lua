-- Give up a lease, hand a grant back, or leave the queue. Hands the lock to the first waiter who listens. Safe to repeat.
-- KEYS  1 lease  2 queue (zset: place -> "token inbox")  3 retired tokens (zset: token by its end)  4 last fencing number
-- ARGV  1 token  2 rest in ms: how long the lock stays taken (0 = given up at once, below 0 = even if it rests)
--       3 ms for which the token is retired, because a command that carries it may still arrive (0 = none can)
--       4 inbox ('' = the token never queued)  5 grant in ms: how long a waiter has to take what it was handed
-- reply 2 handed on | 1 released | 0 the token did not hold the lock; its place, if any, is gone
local token, rest, retire, inbox = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local LEASE, QUEUE, RETIRED, LAST = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

if retire > 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', RETIRED, '-inf', now)
  redis.call('ZADD', RETIRED, 'GT', now + retire, token)
  if redis.call('PTTL', RETIRED) < retire then redis.call('PEXPIRE', RETIRED, retire) end
end

local lease = redis.call('GETRANGE', LEASE, 0, 44)
if string.sub(lease, 1, 27) ~= token .. ' ' then
  if inbox ~= '' then redis.call('ZREM', QUEUE, token .. ' ' .. inbox) end
  return 0
end
local state = string.sub(lease, 28, 28)
if state == 'r' and rest >= 0 then return 1 end
if rest > 0 and state == 'h' then
  redis.call('SETRANGE', LEASE, 27, 'r')
  redis.call('PEXPIRE', LEASE, rest)
  return 1
end

while true do
  local head = redis.call('ZPOPMIN', QUEUE)
  if not head[1] then
    redis.call('DEL', LEASE)
    return 1
  end
  local first, ears = string.sub(head[1], 1, 26), string.sub(head[1], 28)
  local verb = string.sub(ears, 1, 1) == 'S' and 'SPUBLISH' or 'PUBLISH'
  if first ~= token and redis.call(verb, string.sub(ears, 2), first .. ' ' .. LEASE) > 0 then
    -- A place is a fencing number too, minted after every earlier grant unless somebody overtook.
    local fence = tonumber(head[2])
    if fence <= tonumber(string.sub(lease, 30, 45)) then
      local time = redis.call('TIME')
      fence = time[1] * 1000000 + time[2]
      local last = tonumber(redis.call('SET', LAST, string.format('%016.0f', fence), 'GET') or 0)
      if last >= fence then
        fence = last + 1
        redis.call('SET', LAST, string.format('%016.0f', fence))
      end
    end
    redis.call('SET', LEASE, first .. ' c ' .. string.format('%016.0f', fence) .. ' ', 'PX', ARGV[5])
    return 2
  end
end
