-- Take the lock on this node, or say who has it. Safe to repeat with the same token.
-- KEYS  1 lease  2 retired tokens (zset: token by its end)  3 last fencing number
-- ARGV  1 token (26 bytes)  2 ttl in ms  3 holder  4 proposed fencing number
--       5 mode  new: a number above all that this node knows, the proposed one if it can be
--               keep: exactly this number, which a majority was or will be told
-- reply {1, fence} granted for the ttl | {-1} this token was retired | {0, ms the lease has left, lease} taken
-- A number is 16 digits.
local token, ttl, proposed, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), ARGV[5] == 'keep'
local LEASE, RETIRED, LAST = KEYS[1], KEYS[2], KEYS[3]

local lease = redis.call('GET', LEASE)
local mine = lease and string.sub(lease, 1, 27) == token .. ' '

if lease and not mine then return {0, redis.call('PTTL', LEASE), lease} end
if mine and string.sub(lease, 28, 28) == 'r' then return {-1} end
if mine and not keep then
  -- The holder is written each time, because another process may have adopted the lease.
  ttl = math.max(ttl, redis.call('PTTL', LEASE))
  redis.call('SET', LEASE, string.sub(lease, 1, 46) .. ARGV[3], 'PX', ttl)
  return {1, string.sub(lease, 30, 45)}
end
if not mine and redis.call('ZSCORE', RETIRED, token) then return {-1} end

local last = tonumber(redis.call('GET', LAST) or 0)
local fence = proposed
if not keep and fence <= last then fence = last + 1 end
local number = string.format('%016.0f', fence)
if fence > last then redis.call('SET', LAST, number) end
if mine then ttl = math.max(ttl, redis.call('PTTL', LEASE)) end
redis.call('SET', LEASE, token .. ' h ' .. number .. ' ' .. ARGV[3], 'PX', ttl)
return {1, number}
