-- What acquire.lua and release.lua include: the lock as it is stored.
-- KEYS  1 lease in the first slot  2 queue (zset: place -> entry)  3 retired tokens, and looks of waiters that poll: "?"
--       and the token (zset: by their end)  4 last fencing number  5 leases in the other slots (zset: by their end)
-- A lease is "1 token state number holder", in another slot than the first "1 token state number slot holder"; an entry is
-- "1 token slots inbox|thread". 1 is the format, slot and slots are 4 digits, and thread is empty yet. An inbox is "polls",
-- or a letter and a channel, which has one bar in it: "S" for sharded pub/sub, "P" for plain, "T" and "Q" for the same of a
-- waiter that may take its lease by the message. A number is 16 digits. A message is "token slot number key", of what the
-- token was handed. The number is 0 for a waiter that takes it by a look, and both are 0 where nothing was handed over.
local NEWER = {err = 'NEWER written by a newer version'} -- what has a larger format stays as it is
-- ms after which each waiter looks by itself, but in a process that waits for very many names. For those it would be 8000,
-- and each hand-over of a lock with so short a TTL would cost one more message and one more look.
local SOON = 1000
local lease -- in the first slot; the script that follows reads it
local others = {} -- the same in the other slots, once they are read: each lease, and its end in ms
local kept_until = 0 -- in ms: when the key of the other slots ends; 0: there is none yet
local grant -- ms that a waiter has to take what it was handed
local time -- once it was asked for; it stands still in a script

local function us()
  time = time or redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function ms()
  return math.floor(us() / 1000)
end

local function is_newer(value)
  return value and string.find(value, '^[2-9] ')
end

-- What others wrote there counts for nothing, and so does a number that doubles do not tell from the next one.
local function counted(value)
  local number = string.match(value or '', '^%d+$') and tonumber(value)
  return number and number < 2^53 and number or 0
end

-- Not a waiter's place, though it is a number, too: in a split brain another master may have granted a larger one since.
local function number()
  local new = us()
  local text = string.format('%016.0f', new)
  local last = counted(redis.call('SET', KEYS[4], text, 'GET'))
  if last >= new then
    text = string.format('%016.0f', last + 1)
    redis.call('SET', KEYS[4], text)
  end
  return text
end

-- Leases

local function slot_of(value) -- of a lease in another slot than the first
  return tonumber(string.sub(value, 49, 52))
end

-- Returns an error where a lease, also the one in the first slot, cannot be read. slots: as many as the caller wants, in
-- 4 digits.
local function read_others(slots)
  if slots ~= '0001' or redis.call('EXISTS', KEYS[5]) == 1 then -- most locks have one slot, and this is cheaper for them
    others = redis.call('ZRANGE', KEYS[5], 0, -1, 'WITHSCORES')
  end
  if others[1] and tonumber(others[2]) <= ms() then
    redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', ms())
    others = redis.call('ZRANGE', KEYS[5], 0, -1, 'WITHSCORES')
  end
  kept_until = math.ceil(others[#others] or 0)
  if is_newer(lease) then return NEWER end
  for i = 1, #others, 2 do
    if is_newer(others[i]) then return NEWER end
    if not string.find(others[i], '^%d%d%d%d ', 49) then -- there is its slot
      return {err = 'UNREADABLE ' .. KEYS[5] .. ' has a member that is no lease'}
    end
  end
end

local function in_others(mine) -- the slot, the lease and its end; mine: its first 29 bytes
  for i = 1, #others, 2 do
    if string.sub(others[i], 1, 29) == mine then
      return slot_of(others[i]), others[i], tonumber(others[i + 1])
    end
  end
end

local function leases() -- how many there are
  return (lease and 1 or 0) + #others / 2
end

local function free_slot() -- the lowest
  local taken = {lease and true}
  for i = 1, #others, 2 do taken[slot_of(others[i])] = true end
  local slot = 1
  while taken[slot] do slot = slot + 1 end
  return slot
end

local function settle() -- the other slots are kept until the last of them ends
  local last = 0
  for i = 2, #others, 2 do last = math.max(last, math.ceil(others[i])) end
  if last > 0 and last ~= kept_until then redis.call('PEXPIREAT', KEYS[5], last) end
  kept_until = last
end

local function remove(value) -- from the other slots; to be settled then
  redis.call('ZREM', KEYS[5], value)
  for i = 1, #others, 2 do
    if others[i] == value then
      table.remove(others, i)
      table.remove(others, i)
      if not others[1] then kept_until = 0 end
      return
    end
  end
end

local function put(slot, mine, state, fence, holder, ttl) -- a lease, into a slot that is free, or its own
  if slot == 1 then
    lease = mine .. state .. ' ' .. fence .. ' ' .. holder
    redis.call('SET', KEYS[1], lease, 'PX', ttl)
    return
  end
  local value, ends = mine .. state .. ' ' .. fence .. ' ' .. string.format('%04d ', slot) .. holder, ms() + ttl
  redis.call('ZADD', KEYS[5], ends, value)
  table.insert(others, value)
  table.insert(others, ends)
  settle()
end

local function first_to_end() -- the lease, and its ms
  local first, left = lease, lease and redis.call('PTTL', KEYS[1])
  for i = 1, #others, 2 do
    if not left or others[i + 1] - ms() < left then first, left = others[i], others[i + 1] - ms() end
  end
  return first, left
end

-- The queue

local function publish(inbox, text)
  local channel = string.sub(inbox, 2)
  if string.find(inbox, '^[ST]') then return redis.call('SPUBLISH', channel, text) end
  return redis.call('PUBLISH', channel, text)
end

local function head() -- and who stands behind it
  local found = redis.call('ZRANGE', KEYS[2], 0, 1)
  return found[1], found[2]
end

local function slots_of(entry)
  return math.max(1, tonumber(string.sub(entry, 30, 33)) or 1)
end

local function inbox_of(entry)
  return string.match(entry, '^[^|]*|[^|]*', 35) or ''
end

local function takes_by_message(inbox)
  return string.find(inbox, '^[TQ]')
end

-- A server that became a replica delivers what its successor publishes. Who hears that there, and not here, is passed by.
local function is_heard_here(inbox)
  local kind = string.find(inbox, '^T') and 'SHARDNUMSUB' or 'NUMSUB'
  local found = redis.pcall('PUBSUB', kind, string.sub(inbox, 2))
  return (tonumber(found[2]) or 0) > 0
end

local function tell(entry, slot, fence) -- what it was handed; of nothing, that it is to look
  local inbox = inbox_of(entry)
  local is_told_all = slot and takes_by_message(inbox) and is_heard_here(inbox)
  local about = slot and slot .. (is_told_all and ' ' .. fence or ' 0') or '0 0'
  return publish(inbox, string.sub(entry, 3, 28) .. ' ' .. about .. ' ' .. KEYS[1])
end

local function polls(entry)
  return string.sub(entry, 35, 40) == 'polls|'
end

local function waited_for(entry) -- ms for which the last look of one that polls still counts, or false
  local left = tonumber(redis.call('ZSCORE', KEYS[3], '?' .. string.sub(entry, 3, 28)) or 0) - ms()
  return left > 0 and left
end

local function is_there(entry)
  if polls(entry) then return waited_for(entry) end
  return publish(inbox_of(entry), '?') > 0
end

-- Hands free slots to those who listen, in their order. Returns who is the first of the queue then, and how many were
-- handed one. That first one polls, and takes its slot by itself; or too many are taken for it, by its own number; or it
-- is the caller, where that stays in the queue.
-- mine: the first 29 bytes of what the caller stores; wanted: its number of slots. While it could have one, who is in its
-- way must be there. first, second: of the queue, if they are known.
local function hand_over(mine, stays, wanted, first, second)
  local handed = 0
  if not first then first, second = head() end
  while true do
    if not first or is_newer(first) then return first, handed end
    if string.sub(first, 1, 29) == mine then
      if stays then return first, handed end
      redis.call('ZREM', KEYS[2], first)
    elseif leases() < slots_of(first) then
      if polls(first) and waited_for(first) then return first, handed end
      redis.call('ZREM', KEYS[2], first)
      if not polls(first) then
        local slot, fence = free_slot(), number()
        if tell(first, slot, fence) > 0 then
          put(slot, string.sub(first, 1, 29), 'c', fence, '', grant)
          handed = handed + 1
        end
      end
    elseif leases() >= wanted or is_there(first) then
      return first, handed
    else
      redis.call('ZREM', KEYS[2], first)
    end
    if second then first, second = second, nil else first, second = head() end
  end
end

local function is_gone(entry)
  if polls(entry) then return not waited_for(entry) end
  return tell(entry) == 0
end

local function wake_first() -- who looks at the end of a lease must know of one that comes before its next look
  repeat
    local first = head()
    local is_dead = first and not is_newer(first) and is_gone(first)
    if is_dead then redis.call('ZREM', KEYS[2], first) end
  until not is_dead
end
