"""What an entry of the settings may say of an ensemble, and what its checks and messages say."""

from __future__ import annotations

import pytest
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE, make_digest_acl

from django_distlock.backends.zookeeper import ZooKeeperBackend
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.runs import LastRun
from tests.support.tools import eventually, locked_names, renewer_of

ACL = [make_digest_acl("shop", "secret", all=True)]


def made(**entry):
    return ZooKeeperBackend("default", entry)


def config(**entry):
    return made(**entry).config


class TestLocation:
    @pytest.mark.parametrize(
        ("location", "hosts", "root"),
        [
            ("zk1:2181,zk2:2182,zk3:2183/shop", [("zk1", 2181), ("zk2", 2182), ("zk3", 2183)], "/shop"),
            ("zk1", [("zk1", 2181)], ""),
            ("zk1/a/b", [("zk1", 2181)], "/a/b"),
            ("zk1:2181/", [("zk1", 2181)], ""),
            ("[::1]:2181,10.0.0.1:2182", [("::1", 2181), ("10.0.0.1", 2182)], ""),
        ],
    )
    def test_has_servers_and_a_path(self, location, hosts, root):
        found = config(LOCATION=location)
        assert (list(found.hosts), found.root) == (hosts, root)

    def test_is_this_machine_by_default(self):
        assert config().text == "127.0.0.1:2181"

    @pytest.mark.parametrize(
        "location",
        ["", "zk1, zk2", "zookeeper://zk1:2181", "zk1:port", ["zk1"], None, "zk1/a//b", "zk1/..", "zk1/zookeeper", 5],
    )
    def test_else_says_what_it_looks_like(self, location):
        with pytest.raises(InvalidLockBackend, match=r"DISTRIBUTED_LOCKS\['default'\]\['LOCATION'\] is .* It has the"):
            made(LOCATION=location)


class TestOptions:
    def test_the_timeout_is_the_ttl_by_default(self):
        assert config().timeout == 30.0
        assert config(TTL=12).timeout == 12.0
        assert config(TTL=12, OPTIONS={"timeout": 40}).timeout == 40.0

    def test_who_logs_in_has_its_nodes_for_itself(self):
        assert config().acl == OPEN_ACL_UNSAFE
        assert config(OPTIONS={"auth": "shop:secret"}).acl == CREATOR_ALL_ACL
        assert config(OPTIONS={"auth": "shop:secret", "acl": ACL}).acl == ACL

    def test_the_password_is_not_shown(self):
        assert "secret" not in repr(config(OPTIONS={"auth": "shop:secret"}))

    def test_tls_is_as_kazoo_has_it(self, tmp_path):
        ca = tmp_path / "ca.pem"
        ca.touch()
        assert config().tls == {"use_ssl": False}
        tls = config(OPTIONS={"use_ssl": True, "ca": ca}).tls
        assert (tls["ca"], tls["verify_certs"], tls["check_hostname"]) == (str(ca), True, True)
        assert not config(OPTIONS={"use_ssl": True, "verify_certs": False}).tls["check_hostname"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"timeout": 0}, r"\['timeout'\] is 0; it is a number of seconds above 0"),
            ({"timeout": True}, r"\['timeout'\] is True"),
            ({"request_timeout": None}, r"\['request_timeout'\] is None; it is a number of seconds"),
            ({"auth": "shop"}, r"\['auth'\] is no text of the form 'user:password'"),
            ({"auth": ("digest", "shop:secret")}, r"\['auth'\] is no text"),
            ({"acl": "all"}, r"\['acl'\] is .*; it is a list of what kazoo.security.make_digest_acl"),
            ({"acl": []}, r"\['acl'\] is \[\]"),
            ({"use_ssl": "yes"}, r"\['use_ssl'\] is 'yes'; choose True or False"),
            ({"use_ssl": True, "ca": "/nowhere.pem"}, r"\['ca'\] is '/nowhere.pem', where there is no file"),
            ({"keyfile_password": "x"}, r"\['keyfile_password'\] is given, but 'use_ssl' is False"),
            ({"session": 5}, r"has the unknown option 'session'\. ZooKeeperBackend knows: .*timeout"),
        ],
    )
    def test_else_say_what_is_wrong(self, options, message):
        with pytest.raises(InvalidLockBackend, match=message) as refused:
            made(OPTIONS=options)
        assert "secret" not in str(refused.value)

    @pytest.mark.parametrize("prefix", ["", 5, "x" * 101])
    def test_a_prefix_is_a_text(self, prefix):
        with pytest.raises(InvalidLockBackend, match=r"\['KEY_PREFIX'\] is "):
            made(KEY_PREFIX=prefix)


class TestChecks:
    def ids(self, **entry):
        return [message.id for message in made(**entry).check_settings()]

    def test_nothing_is_wrong_with_three_servers(self):
        assert self.ids(LOCATION="zk1,zk2,zk3") == self.ids(LOCATION="zk1") == []

    def test_a_ttl_above_the_timeout_is_told(self):
        assert self.ids(TTL=60, OPTIONS={"timeout": 30}) == ["distlock.W040"]

    def test_an_even_number_of_servers_is_told(self):
        assert self.ids(LOCATION="zk1,zk2,zk3,zk4") == ["distlock.W041"]


def test_who_keeps_the_same_locks_says_the_same():
    one, other = made(LOCATION="zk1,zk2/shop"), made(LOCATION="zk2:2181,zk1:2181/shop", TTL=5)
    assert one.keyspace == other.keyspace
    assert one.keyspace[-1] == "lock"
    for different in ({"LOCATION": "zk1,zk2"}, {"LOCATION": "zk1,zk2/shop", "KEY_PREFIX": "other"}):
        assert made(**different).keyspace != one.keyspace


def test_no_server_is_needed_before_anything_is_asked():
    made(LOCATION="127.0.0.1:1").close()


def test_runs_and_locks_are_refused_by_who_may_not_write(zookeeper, root, configured, caplog):
    """A final error says what to do: nobody waits for rights."""
    from kazoo.client import KazooClient

    from django_distlock import LockBackendError, lock

    owner = KazooClient(zookeeper.address, auth_data=[("digest", "owner:secret")])
    owner.start(30)
    owner.create(root, acl=CREATOR_ALL_ACL)
    owner.stop()
    owner.close()
    backend = configured(f"{zookeeper.address}{root}")
    with pytest.raises(LockBackendError, match=r"refuses: NoAuth.*all rights \(cdrwa\)") as refused:
        lock("name", wait=60).acquire()
    assert refused.value.is_final
    with pytest.raises(LockBackendError, match="refuses: NoAuth"):
        backend.claim_run("entry", LastRun(1.0), LastRun(2.0), 60)
    backend = configured(f"{zookeeper.address}{root}", options={"auth": "owner:secret"})
    with lock("name"):
        assert locked_names(backend) == ["name"]


def test_what_may_not_be_deleted_is_not_tried_for_ever(root, configured, zookeeper, behind_proxy, caplog):
    """A failed release is tried again in the background; but nobody has these rights a moment later."""
    from django_distlock import LockBackendError, lock

    renewer = renewer_of(configured(f"{zookeeper.address}{root}"))
    held = lock("name")
    held.acquire()
    [place] = behind_proxy.places()
    behind_proxy.client.set_acls(f"{root}{place.rpartition('/')[0]}", READ_ACL_UNSAFE)
    with pytest.raises(LockBackendError, match="refuses: NoAuth"):
        held.release()
    eventually(lambda: "could not be released; the end of its session frees it" in caplog.text)
    eventually(lambda: not renewer.is_cleaning)
