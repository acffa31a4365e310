-- Give up a lease, hand a grant back, or leave the queue. Hands free slots to waiters who listen. Safe to repeat.
-- KEYS, leases and entries: see lock.lua
-- ARGV  1 token  2 grant in ms: how long a waiter has to take what it was handed. The others are given together, or none is:
--       3 cooldown in ms: how long the slot stays taken (0 = given up at once)
--       4 ms for which the token is retired, because a command that carries it may still arrive (0 = none can)
--       5 inbox ('' = the token never queued)
--       6 1 = hand back: what is still being handed over, but never a lease that somebody has taken since, and so none
--       of an inbox whose waiters take it by the message; else 0
--       7 1 = an operator frees the slot even in its cooldown; else 0
--       8 slots that the waiter wants, in 4 digits, as in its entry
-- reply 2 handed on | 1 released; the first waiter takes the slot by itself, if that one polls
--       | 0 the token did not hold the lock; its place, if any, is gone
--       | error NEWER: what stands there has a larger format, and stays as it is
--       | error UNREADABLE: among the leases in the other slots is something that is none

-- Most leases end while nobody waits. See acquire.lua
if not ARGV[3] and redis.call('EXISTS', KEYS[2]) == 0
    and redis.call('GETRANGE', KEYS[1], 0, 29) == '1 ' .. ARGV[1] .. ' h' then
  redis.call('DEL', KEYS[1])
  return 1
end

-- include lock.lua
-- include retire.lua

local LONGEST = 8000 -- ms after which each waiter looks by itself, at the latest
local token, cooldown = ARGV[1], tonumber(ARGV[3] or 0)
local inbox, slots = ARGV[5] or '', ARGV[8] or '0001'
local mine = '1 ' .. token .. ' '
grant = ARGV[2]

local function warn_first(within) -- of the end of a lease, if that comes before so many ms
  local _, left = first_to_end()
  if left and left < within then wake_first() end
end

local first, second = head()
lease = redis.call('GETRANGE', KEYS[1], 0, 46)
lease = lease ~= '' and lease
local is_first = lease and string.sub(lease, 1, 29) == mine
local slot, value, refusal = 1, lease, nil
if first or not is_first then refusal = read_others(slots) end -- else nobody is interested in them
if not is_first then slot, value = in_others(mine) end
if is_newer(first) or is_newer(lease) and not slot then return NEWER end

retire(token, tonumber(ARGV[4] or 0))

if inbox == 'polls' then redis.call('ZREM', KEYS[3], '?' .. token) end
if not slot then
  if inbox ~= '' and redis.call('ZREM', KEYS[2], mine .. slots .. ' ' .. inbox .. '|') == 1 and not refusal then
    if hand_over(mine, false, 0) then warn_first(LONGEST) end -- it may have been in the way of others
  end
  return refusal or 0
end
local state, fence = string.sub(value, 30, 30), string.sub(value, 32, 47)
if ARGV[6] == '1' and (state ~= 'c' or takes_by_message(inbox)) then return 0 end
if state == 'r' and ARGV[7] ~= '1' then return 1 end
if cooldown > 0 and state == 'h' then
  if slot == 1 then
    redis.call('SETRANGE', KEYS[1], 29, 'r')
    redis.call('PEXPIRE', KEYS[1], cooldown)
  else
    remove(value)
    put(slot, mine, 'r', fence, string.sub(value, 54), cooldown)
  end
  if cooldown < LONGEST then wake_first() end
  return 1
end

if slot == 1 then
  lease = nil
else
  remove(value)
end
local handed = 0
if first and not refusal then -- else nobody can tell which slots are free
  first, handed = hand_over(mine, false, 0, first, second)
  if first and others[1] then warn_first(SOON) end
end
if slot > 1 then settle() elseif not lease then redis.call('DEL', KEYS[1]) end
return handed > 0 and 2 or 1
