"""What servers know of each command before they execute it: how many arguments it has, and when it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# By the words of COMMAND INFO: arity, flags, positions of keys.
_TABLE = """
get 2 - 1 1 | getrange 4 - 1 1 | mget -2 - 1 -1 | exists -2 - 1 -1 | pttl 2 - 1 1 | ttl 2 - 1 1 | type 2 - 1 1
zrange -4 - 1 1 | zrank -3 - 1 1 | zscore 3 - 1 1 | zcard 2 - 1 1 | scan -2 - 0 0 | dbsize 1 - 0 0
set -3 write,denyoom 1 1 | setrange 4 write,denyoom 1 1 | rpush -3 write,denyoom 1 1 | zadd -4 write,denyoom 1 1
del -2 write 1 -1 | unlink -2 write 1 -1 | pexpire -3 write 1 1 | pexpireat -3 write 1 1
zrem -3 write 1 1 | zremrangebyscore 4 write 1 1
zpopmin -2 write 1 1 | flushall -1 write 0 0 | flushdb -1 write 0 0
time 1 loading,stale 0 0 | publish 3 loading,stale,pubsub,replicates 0 0
spublish 3 loading,stale,pubsub,channel,replicates 1 1
pubsub|numsub -2 loading,stale,pubsub 0 0 | pubsub|shardnumsub -2 loading,stale,pubsub 0 0
subscribe -2 loading,stale,noscript,pubsub,listener 0 0 | unsubscribe -1 loading,stale,noscript,pubsub,listener 0 0
psubscribe -2 loading,stale,noscript,pubsub,listener 0 0 | punsubscribe -1 loading,stale,noscript,pubsub,listener 0 0
ssubscribe -2 loading,stale,noscript,pubsub,channel,listener 1 -1
sunsubscribe -1 loading,stale,noscript,pubsub,channel,listener 1 -1
eval -3 noscript,stale,script 0 0 | evalsha -3 noscript,stale,script 0 0
script|load 3 noscript,stale 0 0 | script|exists -3 noscript,stale 0 0 | script|flush -2 noscript,stale 0 0
script|kill 2 noscript,busy 0 0
info -1 loading,stale 0 0 | role 1 loading,stale,noscript 0 0 | ping -1 listener,disk 0 0 | echo 2 loading,stale 0 0
quit -1 loading,stale,busy,no_auth,noscript,listener 0 0 | reset 1 loading,stale,busy,no_auth,noscript,listener 0 0
client|setinfo 4 loading,stale,busy,noscript 0 0 | client|setname 3 loading,stale,busy,noscript 0 0
client|getname 2 loading,stale,busy,noscript 0 0 | client|id 2 loading,stale,busy,noscript 0 0
client|kill -3 loading,stale,noscript 0 0
select 2 loading,stale,busy 0 0 | auth -2 loading,stale,busy,no_auth,noscript 0 0
hello -1 loading,stale,busy,no_auth,noscript 0 0
config|get -3 loading,stale,noscript 0 0 | config|set 4 loading,stale,noscript 0 0
replicaof 3 stale,noscript 0 0 | wait 3 - 0 0
asking 1 - 0 0 | readonly 1 loading,stale 0 0 | readwrite 1 loading,stale 0 0
cluster|slots 2 loading,stale 0 0 | cluster|shards 2 loading,stale 0 0 | cluster|nodes 2 loading,stale 0 0
cluster|info 2 loading,stale 0 0 | cluster|myid 2 loading,stale 0 0 | cluster|keyslot 3 stale 0 0
cluster|setslot -4 stale 0 0 | cluster|getkeysinslot 4 stale 0 0 | cluster|countkeysinslot 3 stale 0 0
cluster|failover -2 stale 0 0
migrate -6 write 3 3
sentinel|get-master-addr-by-name 3 - 0 0 | sentinel|master 3 - 0 0 | sentinel|masters 2 - 0 0
sentinel|sentinels 3 - 0 0 | sentinel|replicas 3 - 0 0 | sentinel|slaves 3 - 0 0 | sentinel|failover 3 - 0 0
sentinel|remove 3 - 0 0 | sentinel|monitor 6 - 0 0 | sentinel|ckquorum 3 - 0 0 | sentinel|myid 2 - 0 0
sentinel|reset 3 - 0 0
"""


class Spec(NamedTuple):
    """``arity``: words of the command, with its name; negative: at least so many. Keys: from the first to the last
    word that is one, 0 for none."""

    name: str
    arity: int
    flags: frozenset[str]
    first_key: int
    last_key: int

    def allows(self, words: int) -> bool:
        return words == self.arity if self.arity > 0 else words >= -self.arity

    def keys(self, command: Sequence[str]) -> list[str]:
        if "script" in self.flags:
            number = int(command[2]) if command[2].isdecimal() else 0
            return list(command[3 : 3 + number]) if number <= len(command) - 3 else []
        if not self.first_key:
            return []
        return list(command[self.first_key : self.last_key + 1 or None])


def _read(line: str) -> Spec:
    name, arity, flags, first, last = line.split()
    return Spec(name, int(arity), frozenset(flags.split(",")) - {"-"}, int(first), int(last))


SPECS = {spec.name: spec for lines in _TABLE.strip().splitlines() for spec in map(_read, lines.split(" | "))}
CONTAINERS = {name.partition("|")[0] for name in SPECS if "|" in name}
