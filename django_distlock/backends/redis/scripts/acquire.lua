-- Try, wait in the queue, look, or take the last chance. Safe to repeat with the same token.
-- KEYS  1 lease  2 queue (zset: place -> entry)  3 retired tokens, and looks of waiters that poll: "?" and the token
--       (zset: by their end)  4 last fencing number
-- ARGV  1 token (26 bytes)  2 holder  3 ttl in ms
--       4 grant in ms: how long a waiter has to take what it was handed, and how long the look of one that polls counts
--       5 mode (none = try)  6 place ('' or none = none yet)
--       7 inbox ('' or none = none; 'polls' = a waiter that cannot be told, so nothing is handed to it)
--       8 ms for which a queue without looks is kept
-- modes try: never queue | wait: queue if busy | again: the same after an attempt that went unanswered
--       look: from the queue, each second or after a hint
--       last: at the caller's deadline, take it if it can be had, else leave the queue
-- reply fencing number: granted for the ttl | -1 this token was retired
--       {place, ms the lease has left (-1 = others come first), lease, listeners of the own inbox (-1 = not asked), or
--       how many stand before one that polls} busy. Where the lock is free, and the first in the queue polls, "lease" is
--       what it would be if it had been handed over
--       | error NEWER: what stands there has a larger format, and stays as it is
-- A lease is "1 token state number holder", an entry "1 token slots inbox|thread": 1 is the format, slots are 4 digits, and
-- thread is empty yet. An inbox is "polls", or "S" or "P" (sharded or plain pub/sub) and a channel, which has one bar in it.
-- A number is 16 digits.

-- Most locks are free, and nothing is known of their waiters and tokens. That is asked first, before all that is made below:
-- Lua makes each function anew in each call.
if ARGV[5] ~= 'look' and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) == 0 then
  local time = redis.call('TIME')
  local fence = time[1] .. string.sub('00000' .. time[2], -6)
  local last = redis.call('SET', KEYS[4], fence, 'GET')
  if #fence == 16 and (not last or (#last == 16 and last < fence)) then
    redis.call('SET', KEYS[1], '1 ' .. ARGV[1] .. ' h ' .. fence .. ' ' .. ARGV[2], 'PX', ARGV[3])
    return tonumber(fence)
  end
  if last then redis.call('SET', KEYS[4], last) end -- the clock went back; or what others wrote, which is looked at below
end

-- ms after which each waiter looks by itself, but in a process that waits for very many names. For those it would be 8000,
-- and each hand-over of a lock with so short a TTL would cost one more message and one more look.
local LOOK = 1000
local NEWER = {err = 'NEWER written by a newer version'}
local token, holder, ttl, grant = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local mode, place, inbox = ARGV[5] or 'try', ARGV[6] or '', ARGV[7] or ''
local mine = '1 ' .. token .. ' '
local me = mine .. '0001 ' .. inbox .. '|'
local is_polling = inbox == 'polls'

local function is_newer(value)
  return value and string.find(value, '^[2-9] ')
end

-- What others wrote there counts for nothing, and so does a number that doubles do not tell from the next one.
local function counted(value)
  local number = string.match(value or '', '^%d+$') and tonumber(value)
  return number and number < 2^53 and number or 0
end

local function number()
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local last = counted(redis.call('SET', KEYS[4], string.format('%016.0f', now), 'GET'))
  if last >= now then
    now = last + 1
    redis.call('SET', KEYS[4], string.format('%016.0f', now))
  end
  return string.format('%016.0f', now)
end

local function publish(inbox, text)
  local channel = string.sub(inbox, 2)
  if string.sub(inbox, 1, 1) == 'S' then return redis.call('SPUBLISH', channel, text) end
  return redis.call('PUBLISH', channel, text)
end

local function head() -- of the queue
  return redis.call('ZRANGE', KEYS[2], 0, 0)[1]
end

local function tell(entry)
  local inbox = string.match(entry, '^[^|]*|[^|]*', 35) or ''
  return publish(inbox, string.sub(entry, 3, 28) .. ' ' .. KEYS[1])
end

local function ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function polls(entry)
  return string.sub(entry, 35, 40) == 'polls|'
end

local function waited_for(entry) -- ms for which the last look of one that polls still counts, or false
  local left = tonumber(redis.call('ZSCORE', KEYS[3], '?' .. string.sub(entry, 3, 28)) or 0) - ms()
  return left > 0 and left
end

local function is_gone(entry)
  if polls(entry) then return not waited_for(entry) end
  return tell(entry) == 0
end

local function wake_first() -- who looks at the end of the lease must know of one that comes before its next look
  repeat
    local first = head()
    local is_dead = first and not is_newer(first) and is_gone(first)
    if is_dead then redis.call('ZREM', KEYS[2], first) end
  until not is_dead
end

local function retired()
  return redis.call('ZSCORE', KEYS[3], token) and true
end

local lease = redis.call('GET', KEYS[1])

if lease and string.sub(lease, 1, 29) == mine then
  local state, fence = string.sub(lease, 30, 30), string.sub(lease, 32, 47)
  if state == 'r' then return -1 end
  if state == 'c' then
    if retired() then return -1 end
  else
    ttl = math.max(ttl, redis.call('PTTL', KEYS[1])) -- a late duplicate must not shorten it
  end
  -- The holder is written each time, because another process may have adopted the lease.
  redis.call('SET', KEYS[1], mine .. 'h ' .. fence .. ' ' .. holder, 'PX', ttl)
  if state == 'c' and ttl < LOOK then wake_first() end
  return tonumber(fence)
end
if is_newer(lease) then return NEWER end

local left
if not lease then
  local is_mine = redis.call('EXISTS', KEYS[2], KEYS[3]) == 0
  if not is_mine then
    if retired() then return -1 end
    if is_newer(head()) then return NEWER end
    if place ~= '' then redis.call('ZADD', KEYS[2], 'LT', place, me) end
    repeat -- whoever finds the lock free hands it to the first who listens, and has no turn before it
      local first = head()
      if is_newer(first) then return NEWER end
      is_mine = not first or string.sub(first, 1, 29) == mine
      left = not is_mine and polls(first) and waited_for(first)
      if left then -- it takes the lock by itself
        lease = string.sub(first, 1, 29) .. 'c 0000000000000000 '
        break
      end
      if first then redis.call('ZREM', KEYS[2], first) end
      if not is_mine and not polls(first) and tell(first) > 0 then
        lease = string.sub(first, 1, 29) .. 'c ' .. number() .. ' '
        redis.call('SET', KEYS[1], lease, 'PX', grant)
      end
    until is_mine or lease
  end
  if is_mine then
    if is_polling then redis.call('ZREM', KEYS[3], '?' .. token) end
    local fence = number()
    redis.call('SET', KEYS[1], mine .. 'h ' .. fence .. ' ' .. holder, 'PX', ttl)
    if ttl < LOOK then wake_first() end
    return tonumber(fence)
  end
end

if mode == 'try' or mode == 'last' then
  left = left or redis.call('PTTL', KEYS[1])
  if mode == 'last' and is_polling then redis.call('ZREM', KEYS[3], '?' .. token) end
  if mode == 'last' and redis.call('ZREM', KEYS[2], me) == 1 and left < LOOK then wake_first() end
  return {'', left, lease, -1}
end
-- A "wait" that arrives after its caller has left may leave a place behind; what that is handed, is handed back.
if (mode ~= 'wait' or is_polling) and retired() then return -1 end

local ears = -1
if mode == 'look' then
  redis.call('ZADD', KEYS[2], 'LT', place, me) -- a waiter that was dropped comes back to its place
  if not is_polling then ears = publish(inbox, '?') end
else
  place = mode == 'again' and redis.call('ZSCORE', KEYS[2], me)
  if not place then
    place = number()
    if redis.call('ZADD', KEYS[2], 'NX', place, me) == 0 then place = redis.call('ZSCORE', KEYS[2], me) end
  end
  place = string.format('%016.0f', tonumber(place))
end
redis.call('PEXPIRE', KEYS[2], ARGV[8])
local ahead = redis.call('ZRANK', KEYS[2], me)
if is_polling then
  local now, counts = ms(), tonumber(grant)
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
  redis.call('ZADD', KEYS[3], now + counts, '?' .. token)
  if redis.call('PTTL', KEYS[3]) < counts then redis.call('PEXPIRE', KEYS[3], counts) end
  ears = ahead
end
return {place, ahead == 0 and redis.call('PTTL', KEYS[1]) or -1, lease, ears}
