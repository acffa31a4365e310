-- Try, wait in the queue, look, or take the last chance. Safe to repeat with the same token.
-- KEYS, leases and entries: see lock.lua
-- ARGV  1 token (26 bytes)  2 holder  3 ttl in ms
--       4 grant in ms: how long a waiter has to take what it was handed, and how long the look of one that polls counts
--       5 mode (none = try)  6 place ('' or none = none yet)
--       7 inbox ('' or none = none; 'polls' = a waiter that cannot be told, so nothing is handed to it)
--       8 ms for which a queue without looks is kept
--       9 slots: how many leases there may be, with this one, in 4 digits (none = 1)
--       10 how many others may have a place when it takes one (none = any number)
-- modes try: never queue | wait: queue if busy | again: the same after an attempt that went unanswered
--       look: from the queue, each second or after a hint; it sends an echo to its inbox | quiet: the same without an echo
--       last: at the caller's deadline, take it if it can be had, else leave the queue
-- reply fencing number: granted for the ttl | {fencing number, slot} granted in another slot than the first
--       | -1 this token was retired
--       {place, ms the lease has left (-1 = others come first), lease, listeners of the own inbox (-1 = not asked), or
--       how many stand before one that polls; -2 = it got no place, because as many others as may have one} busy. The
--       lease is the one that ends first. Where a slot is free for the first in the queue, which polls, it is what that
--       one would have if it had been handed it
--       | error NEWER: what stands there has a larger format, and stays as it is
--       | error UNREADABLE: among the leases in the other slots is something that is none

-- Most locks are free, and nothing is known of their waiters and tokens. That is asked first, before all that is made below:
-- Lua makes each function anew in each call.
if ARGV[5] ~= 'look' and ARGV[5] ~= 'quiet' and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3], KEYS[5]) == 0 then
  local time = redis.call('TIME')
  local fence = time[1] .. string.sub('00000' .. time[2], -6)
  local last = redis.call('SET', KEYS[4], fence, 'GET')
  if #fence == 16 and (not last or (#last == 16 and last < fence)) then
    redis.call('SET', KEYS[1], '1 ' .. ARGV[1] .. ' h ' .. fence .. ' ' .. ARGV[2], 'PX', ARGV[3])
    return tonumber(fence)
  end
  if last then redis.call('SET', KEYS[4], last) end -- the clock went back; or what others wrote, which is looked at below
end

-- include lock.lua

local token, holder, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local mode, place, inbox, slots = ARGV[5] or 'try', ARGV[6] or '', ARGV[7] or '', ARGV[9] or '0001'
local wanted = tonumber(slots)
local mine = '1 ' .. token .. ' '
local me = mine .. slots .. ' ' .. inbox .. '|'
local is_polling = inbox == 'polls'
grant = ARGV[4]

local function retired()
  return redis.call('ZSCORE', KEYS[3], token) and true
end

local function granted(slot, fence)
  return slot == 1 and tonumber(fence) or {tonumber(fence), slot}
end

local function confirmed(slot, value, ends) -- a lease that the token has already
  local state, fence = string.sub(value, 30, 30), string.sub(value, 32, 47)
  if state == 'r' then return -1 end
  if state == 'c' then
    if retired() then return -1 end
  else
    local left = ends and ends - ms() or redis.call('PTTL', KEYS[1])
    ttl = math.max(ttl, left) -- a late duplicate must not shorten it
  end
  -- The holder is written each time, because another process may have adopted the lease.
  if slot > 1 then remove(value) end
  put(slot, mine, 'h', fence, holder, ttl)
  if state == 'c' and ttl < SOON then wake_first() end
  return granted(slot, fence)
end

lease = redis.call('GET', KEYS[1])
if lease and string.sub(lease, 1, 29) == mine then
  return confirmed(1, lease)
end
local refusal = read_others(slots)
local slot, value, ends = in_others(mine)
if slot then return confirmed(slot, value, ends) end
if refusal then return refusal end

local shown, left -- of the lease in the way, if it is not there yet
local stays = mode ~= 'try' and mode ~= 'last' -- in the queue, where it is not granted
local may_grant = not lease or wanted > 1 or others[1] -- to it or to others; not where one slot is all, and is taken
if (may_grant or stays) and retired() then return -1 end -- a place of nobody would stop all who want more slots
if may_grant then
  if place ~= '' then
    if is_newer(head()) then return NEWER end
    redis.call('ZADD', KEYS[2], 'LT', place, me)
  end
  local first = hand_over(mine, true, wanted) -- whoever finds slots free hands them on, and has no turn before others
  if is_newer(first) then return NEWER end
  local is_next = not first or string.sub(first, 1, 29) == mine
  if is_next and leases() < wanted then
    if first then redis.call('ZREM', KEYS[2], first) end
    if is_polling then redis.call('ZREM', KEYS[3], '?' .. token) end
    local fence, slot = number(), free_slot()
    put(slot, mine, 'h', fence, holder, ttl)
    if hand_over(mine, false, 0) and (ttl < SOON or others[1]) then
      local _, soonest = first_to_end()
      if soonest < SOON then wake_first() end
    end
    return granted(slot, fence)
  end
  if not is_next and polls(first) and leases() < slots_of(first) then -- it takes the slot by itself
    shown, left = string.sub(first, 1, 29) .. 'c 0000000000000000 ', waited_for(first)
  end
end

local function drop(entry) -- from the queue, in which it may have been in the way of others
  if redis.call('ZREM', KEYS[2], entry) == 1 and hand_over(mine, false, 0) then
    local _, soonest = first_to_end()
    if soonest and soonest < SOON then wake_first() end
  end
end

-- One of them is asked whether it is still there, another one each time: the more are dead, the sooner one is found.
local function is_crowded(most)
  local places = redis.call('ZCARD', KEYS[2])
  if places < most then return false end
  local entry = redis.call('ZRANGE', KEYS[2], us() % places, us() % places)[1]
  if is_newer(entry) or is_there(entry) then return true end
  drop(entry)
  return redis.call('ZCARD', KEYS[2]) >= most
end

if not stays then
  if not shown then shown, left = first_to_end() end
  if mode == 'last' and is_polling then redis.call('ZREM', KEYS[3], '?' .. token) end
  if mode == 'last' then drop(me) end
  return {'', left, shown, -1}
end

local ears = -1
if mode == 'look' or mode == 'quiet' then
  redis.call('ZADD', KEYS[2], 'LT', place, me) -- a waiter that was dropped comes back to its place
  if mode == 'look' and not is_polling then ears = publish(inbox, '?') end
else
  local kept = (mode == 'again' or ARGV[10]) and redis.call('ZSCORE', KEYS[2], me)
  if not kept then
    if ARGV[10] and is_crowded(tonumber(ARGV[10])) then
      if not shown then shown, left = first_to_end() end
      return {'', left, shown, -2}
    end
    place = number()
    kept = redis.call('ZADD', KEYS[2], 'NX', place, me) == 0 and redis.call('ZSCORE', KEYS[2], me)
  end
  if kept then place = string.format('%016.0f', tonumber(kept)) end
end
redis.call('PEXPIRE', KEYS[2], ARGV[8])
local ahead = redis.call('ZRANK', KEYS[2], me)
if is_polling then
  local counts = tonumber(grant)
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ms())
  redis.call('ZADD', KEYS[3], ms() + counts, '?' .. token)
  if redis.call('PTTL', KEYS[3]) < counts then redis.call('PEXPIRE', KEYS[3], counts) end
  ears = ahead
end
local soonest = shown or lease
if not shown and (ahead == 0 or others[1]) then soonest, left = first_to_end() end
return {place, ahead == 0 and left or -1, soonest, ears}
