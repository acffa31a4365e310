-- Take a free lock. Safe to repeat with the same token: what an earlier attempt was granted is granted again.
-- KEYS  1 lease  2 retired tokens (set)  3 last fencing number
-- ARGV  1 token (26 bytes)  2 ttl in ms  3 holder
-- reply {1, fence} granted for the ttl | {0, lease, ms it has left} busy | {-1} this token was retired
local lease, token, ttl = redis.call('GET', KEYS[1]), ARGV[1], tonumber(ARGV[2])

if lease then
  if string.sub(lease, 1, 27) ~= token .. ' ' then return {0, lease, redis.call('PTTL', KEYS[1])} end
  if string.sub(lease, 28, 28) == 'r' then return {-1} end
  if redis.call('PTTL', KEYS[1]) < ttl then redis.call('PEXPIRE', KEYS[1], ttl) end
  return {1, string.sub(lease, 30, 45)}
end
if redis.call('SISMEMBER', KEYS[2], token) == 1 then return {-1} end

local time = redis.call('TIME')
local fence = time[1] * 1000000 + time[2]
local last = tonumber(redis.call('SET', KEYS[3], string.format('%.0f', fence), 'GET') or 0)
if last >= fence then
  fence = last + 1
  redis.call('SET', KEYS[3], string.format('%.0f', fence))
end
fence = string.format('%016.0f', fence)
redis.call('SET', KEYS[1], token .. ' h ' .. fence .. ' ' .. ARGV[3], 'PX', ttl)
return {1, fence}
