-- Shows whether scripts learn who receives a message. Behind some proxies the number means nothing.
-- KEYS  1 lease: only to choose its node
-- ARGV  1 inbox of a process that listens: "S" or "P" (sharded or plain pub/sub) and a channel
-- reply {receivers at that inbox, receivers at one that nobody has}
local function publish(inbox)
  local channel = string.sub(inbox, 2)
  if string.sub(inbox, 1, 1) == 'S' then return redis.call('SPUBLISH', channel, '?') end
  return redis.call('PUBLISH', channel, '?')
end

return {publish(ARGV[1]), publish(ARGV[1] .. ':nobody')}
