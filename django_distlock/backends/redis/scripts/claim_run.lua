-- Move the stamp of a beat entry unless another beat has moved it. Safe to repeat with the same token.
-- KEYS  1 stamp: [at, token, next_at, host] in JSON, times in seconds of Unix time
--       2 there while the stamp is so new that older beats may know better: nobody is given the run
-- ARGV  1 when the caller saw it run  2 when it runs now (not later than 1 = only tell)  3 token of this claim
--       4 stamp to keep if there is none  5 stamp of this run  6 ttl in ms  7 ms for which KEYS 2 is kept
-- reply nil moved (or moved already by this token) | the stamp that stands: a newer one, or none may be moved yet
local seen, now = tonumber(ARGV[1]), tonumber(ARGV[2])
local stamp = redis.call('GET', KEYS[1])
if not stamp then
  redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[6])
  redis.call('SET', KEYS[2], '', 'PX', ARGV[7])
  return ARGV[4]
end
local standing = cjson.decode(stamp)
if standing[1] > seen and standing[2] ~= ARGV[3] then return stamp end
if now > seen and redis.call('EXISTS', KEYS[2]) == 1 then return stamp end
if now > standing[1] then redis.call('SET', KEYS[1], ARGV[5], 'PX', ARGV[6]) end
return false
