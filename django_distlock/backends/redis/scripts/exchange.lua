-- End a lease, and put another one into its slot. Safe to repeat.
-- KEYS, leases and entries: see lock.lua
-- ARGV  1 token of the new lease  2 its holder  3 its ttl in ms  4 token of the lease that ends
--       5 ms for which the token in 4 is retired, because a command that carries it may still arrive (0 = none can)
-- reply fencing number | {fencing number, slot}: as in acquire.lua
--       | 0 nothing was exchanged: an ordinary attempt finds out why, or repeats the grant of an earlier exchange
--       | errors NEWER and UNREADABLE: see acquire.lua

-- include lock.lua
-- include retire.lua

local new, holder, ttl, old = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local theirs = '1 ' .. old .. ' h'

lease = redis.call('GET', KEYS[1])
local refusal = read_others('0001')
retire(old, tonumber(ARGV[5]))
local slot, value = 1, lease
if not lease or string.sub(lease, 1, 30) ~= theirs then slot, value = in_others(string.sub(theirs, 1, 29)) end
if not slot or string.sub(value, 1, 30) ~= theirs or redis.call('ZSCORE', KEYS[3], new) then
  return refusal or 0
end

if slot > 1 then remove(value) end
local fence = number()
put(slot, '1 ' .. new .. ' ', 'h', fence, holder, ttl)
if ttl < SOON then wake_first() end
return slot == 1 and tonumber(fence) or {tonumber(fence), slot}
