-- Try, wait in the queue, look, or take the last chance. Safe to repeat with the same token.
-- KEYS  1 lease  2 queue (zset: place -> "token inbox")  3 retired tokens (zset: token by its end)  4 last fencing number
-- ARGV  1 token (26 bytes)  2 ttl in ms  3 holder  4 mode  5 place ('' = none yet)  6 inbox ('' = none)
--       7 grant in ms: how long a waiter has to take what it was handed  8 ms for which a queue without looks is kept
-- modes try: never queue | wait: queue if busy | again: the same after an attempt that went unanswered
--       look: from the queue, each second or after a hint
--       last: at the caller's deadline, take it if it can be had, else leave the queue
-- reply {1, fence} granted for the ttl | {-1} this token was retired
--       {0, place, ms the lease has left (-1 = not asked), lease, listeners of the own inbox (-1 = not asked)} busy
-- An inbox is "S" or "P" (sharded or plain pub/sub) and a channel. A number is 16 digits.
local token, ttl, holder, mode, place = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local me = token .. ' ' .. ARGV[6]
local LEASE, QUEUE, RETIRED, LAST = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function number()
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local last = tonumber(redis.call('SET', LAST, string.format('%016.0f', now), 'GET') or 0)
  if last >= now then
    now = last + 1
    redis.call('SET', LAST, string.format('%016.0f', now))
  end
  return string.format('%016.0f', now)
end

local function tell(inbox, text)
  local verb = string.sub(inbox, 1, 1) == 'S' and 'SPUBLISH' or 'PUBLISH'
  return redis.call(verb, string.sub(inbox, 2), text)
end

local function retired()
  return redis.call('ZSCORE', RETIRED, token) and true
end

local lease = redis.call('GET', LEASE)

if lease and string.sub(lease, 1, 27) == token .. ' ' then
  local state, fence = string.sub(lease, 28, 28), string.sub(lease, 30, 45)
  if state == 'r' then return {-1} end
  if state == 'c' then
    if retired() then return {-1} end
  else
    ttl = math.max(ttl, redis.call('PTTL', LEASE)) -- a late duplicate must not shorten it
  end
  -- The holder is written each time, because another process may have adopted the lease.
  redis.call('SET', LEASE, token .. ' h ' .. fence .. ' ' .. holder, 'PX', ttl)
  return {1, fence}
end

if not lease then
  local mine = redis.call('EXISTS', QUEUE, RETIRED) == 0
  if not mine then
    if retired() then return {-1} end
    if place ~= '' then redis.call('ZADD', QUEUE, 'LT', place, me) end
    repeat -- whoever finds the lock free hands it to the first who listens, and has no turn before it
      local head = redis.call('ZPOPMIN', QUEUE)[1]
      local first = head and string.sub(head, 1, 26)
      if not head or first == token then
        mine = true
      elseif tell(string.sub(head, 28), first .. ' ' .. LEASE) > 0 then
        lease = first .. ' c ' .. number() .. ' '
        redis.call('SET', LEASE, lease, 'PX', ARGV[7])
      end
    until mine or lease
  end
  if mine then
    local fence = number()
    redis.call('SET', LEASE, token .. ' h ' .. fence .. ' ' .. holder, 'PX', ttl)
    return {1, fence}
  end
end

if mode == 'try' or mode == 'last' then
  if mode == 'last' then redis.call('ZREM', QUEUE, me) end
  return {0, '', redis.call('PTTL', LEASE), lease, -1}
end
-- A "wait" that arrives after its caller has left may leave a place behind; what that is handed, is handed back.
if mode ~= 'wait' and retired() then return {-1} end

if mode == 'look' then
  redis.call('ZADD', QUEUE, 'LT', place, me) -- a waiter that was dropped comes back to its place
  redis.call('PEXPIRE', QUEUE, ARGV[8])
  local is_first = redis.call('ZRANK', QUEUE, me) == 0
  return {0, place, is_first and redis.call('PTTL', LEASE) or -1, lease, tell(ARGV[6], '?')}
end

place = mode == 'again' and redis.call('ZSCORE', QUEUE, me)
if not place then
  place = number()
  if redis.call('ZADD', QUEUE, 'NX', place, me) == 0 then place = redis.call('ZSCORE', QUEUE, me) end
end
redis.call('PEXPIRE', QUEUE, ARGV[8])
return {0, string.format('%016.0f', tonumber(place)), -1, lease, -1}
