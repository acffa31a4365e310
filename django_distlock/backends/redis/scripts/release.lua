-- Give up a lease, hand a grant back, or leave the queue. Hands the lock to the first waiter who listens. Safe to repeat.
-- KEYS  1 lease  2 queue (zset: place -> entry)  3 retired tokens, and looks of waiters that poll: "?" and the token
--       (zset: by their end)  4 last fencing number
-- ARGV  1 token  2 grant in ms: how long a waiter has to take what it was handed. The others are given together, or none is:
--       3 cooldown in ms: how long the lock stays taken (0 = given up at once)
--       4 ms for which the token is retired, because a command that carries it may still arrive (0 = none can)
--       5 inbox ('' = the token never queued)
--       6 1 = hand back: what is still being handed over, but never a lease that somebody has taken since; else 0
--       7 1 = an operator frees the lock even in its cooldown; else 0
-- reply 2 handed on | 1 released; the first waiter takes it by itself, if that one polls
--       | 0 the token did not hold the lock; its place, if any, is gone
--       | error NEWER: what stands there has a larger format, and stays as it is
-- Leases and entries: see acquire.lua

-- Most leases end while nobody waits. See acquire.lua
if not ARGV[3] and redis.call('EXISTS', KEYS[2]) == 0
    and redis.call('GETRANGE', KEYS[1], 0, 29) == '1 ' .. ARGV[1] .. ' h' then
  redis.call('DEL', KEYS[1])
  return 1
end

local token, grant, cooldown, retire = ARGV[1], ARGV[2], tonumber(ARGV[3] or 0), tonumber(ARGV[4] or 0)
local inbox = ARGV[5] or ''
local mine = '1 ' .. token .. ' '
local NEWER = {err = 'NEWER written by a newer version'}
local LOOK = 8000 -- ms after which each waiter looks by itself at the latest

local function is_newer(value)
  return value and string.find(value, '^[2-9] ')
end

local function head() -- of the queue
  return redis.call('ZRANGE', KEYS[2], 0, 0)[1]
end

local function tell(entry)
  local inbox = string.match(entry, '^[^|]*|[^|]*', 35) or ''
  local channel, text = string.sub(inbox, 2), string.sub(entry, 3, 28) .. ' ' .. KEYS[1]
  if string.sub(inbox, 1, 1) == 'S' then return redis.call('SPUBLISH', channel, text) end
  return redis.call('PUBLISH', channel, text)
end

local function polls(entry)
  return string.sub(entry, 35, 40) == 'polls|'
end

local function looked(entry) -- one that polls, lately
  local time = redis.call('TIME')
  local counts_until = redis.call('ZSCORE', KEYS[3], '?' .. string.sub(entry, 3, 28))
  return counts_until and tonumber(counts_until) > time[1] * 1000 + math.floor(time[2] / 1000)
end

local function is_gone(entry)
  if polls(entry) then return not looked(entry) end
  return tell(entry) == 0
end

local function wake_first() -- who looks at the end of the lease must know of one that comes before its next look
  repeat
    local first = head()
    local is_dead = first and not is_newer(first) and is_gone(first)
    if is_dead then redis.call('ZREM', KEYS[2], first) end
  until not is_dead
end

-- What others wrote there counts for nothing, and so does a number that doubles do not tell from the next one.
local function counted(value)
  local number = string.match(value or '', '^%d+$') and tonumber(value)
  return number and number < 2^53 and number or 0
end

local lease, first = redis.call('GETRANGE', KEYS[1], 0, 46), head()
if is_newer(lease) or is_newer(first) then return NEWER end

if retire > 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
  redis.call('ZADD', KEYS[3], 'GT', now + retire, token)
  if redis.call('PTTL', KEYS[3]) < retire then redis.call('PEXPIRE', KEYS[3], retire) end
end

if inbox == 'polls' then redis.call('ZREM', KEYS[3], '?' .. token) end
if string.sub(lease, 1, 29) ~= mine then
  local left = inbox ~= '' and redis.call('ZREM', KEYS[2], mine .. '0001 ' .. inbox .. '|') == 1
  if left and redis.call('PTTL', KEYS[1]) < LOOK then wake_first() end
  return 0
end
local state = string.sub(lease, 30, 30)
if ARGV[6] == '1' and state ~= 'c' then return 0 end
if state == 'r' and ARGV[7] ~= '1' then return 1 end
if cooldown > 0 and state == 'h' then
  redis.call('SETRANGE', KEYS[1], 29, 'r')
  redis.call('PEXPIRE', KEYS[1], cooldown)
  if cooldown < LOOK then wake_first() end
  return 1
end

while first do
  local is_other = string.sub(first, 1, 29) ~= mine
  if is_other and polls(first) and looked(first) then break end -- it takes the lock by itself
  redis.call('ZREM', KEYS[2], first)
  if is_other and not polls(first) and tell(first) > 0 then
    -- Not the place, though it is a number, too: in a split brain another master may have granted a larger one since.
    local time = redis.call('TIME')
    local fence = time[1] * 1000000 + time[2]
    local last = counted(redis.call('SET', KEYS[4], string.format('%016.0f', fence), 'GET'))
    if last >= fence then
      fence = last + 1
      redis.call('SET', KEYS[4], string.format('%016.0f', fence))
    end
    local number = string.format('%016.0f', fence)
    redis.call('SET', KEYS[1], string.sub(first, 1, 29) .. 'c ' .. number .. ' ', 'PX', grant)
    return 2
  end
  first = head()
  if is_newer(first) then return NEWER end
end
redis.call('DEL', KEYS[1])
return 1
