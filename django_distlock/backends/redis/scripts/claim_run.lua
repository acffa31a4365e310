-- Move the stamp of a beat entry unless another beat has moved it. Safe to repeat with the same token.
-- KEYS  1 stamp: "1 ", the format, and [at, token, next_at, host] in JSON, times in seconds of Unix time
--       2 exists while the stamp is so new that older beats may know better: then nobody is given the run
-- ARGV  1 when the entry last ran, as the caller knows  2 when it runs now (not later than 1 = only tell the store 1)
--       3 token of this claim
--       4 stamp to keep if there is none  5 stamp of this run  6 ttl in ms  7 ms for which KEYS 2 is kept
--       8 seconds that 2 may be ahead of the clock here
-- reply nil moved (or moved already by this token) | the stamp that stands: it is newer, or may not be moved yet
--       | error NEWER: the stamp has a larger format | -1 it is not a stamp, or its time is more than a day from now
--       | ms that 2 is ahead of the clock, if too many
local seen, now = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local clock = time[1] + time[2] / 1000000
if now > clock + tonumber(ARGV[8]) then return math.floor((now - clock) * 1000) end
local stamp = redis.pcall('GET', KEYS[1])
if type(stamp) == 'table' then return string.find(stamp.err, 'WRONGTYPE', 1, true) and -1 or stamp end
if not stamp then
  redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[6])
  redis.call('SET', KEYS[2], '', 'PX', ARGV[7])
  return ARGV[4]
end
if string.find(stamp, '^[2-9] ') then return {err = 'NEWER written by a newer version'} end
local is_json, standing = pcall(cjson.decode, string.match(stamp, '^1 (.*)'))
local at = is_json and type(standing) == 'table' and standing[1]
if type(at) ~= 'number' or not (at >= 0 and at <= clock + 86400) then return -1 end
if at > seen and standing[2] ~= ARGV[3] then return stamp end
if now > seen and redis.call('EXISTS', KEYS[2]) == 1 then return stamp end
if now > at then redis.call('SET', KEYS[1], ARGV[5], 'PX', ARGV[6]) end
return false
