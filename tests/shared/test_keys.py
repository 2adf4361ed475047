"""The keys of sockets: their files, what is refused of them, and who does not get in without one."""

import logging
import os
import socket
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from omnirelay.errors import ConfigError, OutputError
from shared.messages import ROLES
from shared.transport.curve import ConnectionGuard
from shared.transport.keys import load_keys, make_keys, public_file, secret_file
from shared.transport.wire import VERSION_BYTE, encode
from tests.shared.support import (
    DEADLINE_S,
    HELLO,
    RETRIES,
    Open,
    RawPeer,
    Stranger,
    attempts,
    check_passes,
    count_of,
    endpoint,
    guard,
    inbox,
    outbox,
    port_of,
    read_all,
    wait_until,
)
from tests.support.children import Patch


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_keys(made, replace=False)
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_secret_files_are_private_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files = make_keys(tmp_path / "keys", replace=False)
    finally:
        os.umask(before)
    assert sorted(files) == sorted((tmp_path / "keys").iterdir())
    assert len(files) == 2 * len(ROLES)
    assert mode(tmp_path / "keys") & 0o077 == 0
    for role in ROLES:
        assert mode(secret_file(tmp_path / "keys", role)) == 0o600
        assert mode(public_file(tmp_path / "keys", role)) == 0o644


def test_each_role_has_a_pair_of_its_own_and_knows_the_others(directory: Path) -> None:
    loaded = [load_keys(directory, role) for role in ROLES]
    assert len({keys.secret for keys in loaded}) == len({*loaded[0].public.values()}) == len(ROLES)
    for role, keys in zip(ROLES, loaded, strict=True):
        assert (keys.role, keys.public) == (role, loaded[0].public)
        assert zmq.curve_public(keys.secret) == keys.public[role]
        assert keys.secret.decode() not in repr(keys)


def test_they_are_certificates_as_pyzmq_reads_them(directory: Path) -> None:
    for role in ROLES:
        keys = load_keys(directory, role)
        assert zmq.auth.load_certificate(public_file(directory, role)) == (keys.public[role], None)
        assert zmq.auth.load_certificate(secret_file(directory, role)) == (keys.public[role], keys.secret)


def test_certificates_that_pyzmq_made_are_taken(tmp_path: Path) -> None:
    for role in ROLES:
        zmq.auth.create_certificates(tmp_path, role)
        secret_file(tmp_path, role).chmod(0o600)
    assert {load_keys(tmp_path, role).role for role in ROLES} == set(ROLES)


def test_a_process_needs_no_secret_but_its_own(directory: Path) -> None:
    for role in ROLES[1:]:
        secret_file(directory, role).unlink()
    assert load_keys(directory, ROLES[0]).role == ROLES[0]
    with pytest.raises(ConfigError, match=r"cannot read the key .*thinker\.key_secret: No such file"):
        load_keys(directory, "thinker")


def test_keys_are_not_replaced_by_accident(directory: Path) -> None:
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(OutputError, match=r"has gateway\.key, gateway\.key_secret, .* nothing was changed"):
        make_keys(directory, replace=False)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    public_file(directory, "talker").unlink()
    with pytest.raises(OutputError):
        make_keys(directory, replace=False)


def test_replaced_keys_are_new_and_private_although_the_old_ones_were_not(directory: Path) -> None:
    before = load_keys(directory, "talker")
    secret_file(directory, "talker").chmod(0o666)
    make_keys(directory, replace=True)
    after = load_keys(directory, "talker")
    assert set(before.public.values()).isdisjoint(after.public.values())
    assert mode(secret_file(directory, "talker")) == 0o600


def test_a_link_is_replaced_and_not_followed(directory: Path, tmp_path: Path) -> None:
    """Else whoever can write into the directory could choose which file is overwritten, or read the keys."""
    other = tmp_path / "other"
    other.write_text("mine")
    secret_file(directory, "gateway").unlink()
    secret_file(directory, "gateway").symlink_to(other)
    make_keys(directory, replace=True)
    assert other.read_text() == "mine"
    assert not secret_file(directory, "gateway").is_symlink()


@pytest.mark.parametrize("others", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_secret_that_others_may_read_is_refused(directory: Path, others: int) -> None:
    path = secret_file(directory, "gateway")
    path.chmod(others)
    with pytest.raises(ConfigError, match=rf"may be read by others \(mode 0{others:o}\): `chmod 600 {path}`"):
        load_keys(directory, "gateway")
    path.chmod(0o400)
    assert load_keys(directory, "gateway")


@pytest.mark.parametrize(
    ("owner", "user", "permissions", "taken"),
    [
        (0, 10001, 0o440, True),
        (0, 10001, 0o640, True),
        (0, 10001, 0o460, False),
        (0, 10001, 0o444, False),
        (0, 0, 0o440, False),
        (10001, 10001, 0o440, False),
    ],
)
def test_a_group_may_read_a_secret_of_roots(
    directory: Path, monkeypatch: Patch, owner: int, user: int, permissions: int, taken: bool
) -> None:
    """As orchestrators mount secrets for a process that is not root."""
    path = secret_file(directory, "gateway")
    path.chmod(permissions)
    real = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[stat.ST_UID] = owner
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if taken:
        assert load_keys(directory, "gateway")
    else:
        with pytest.raises(ConfigError, match="may be read by others"):
            load_keys(directory, "gateway")


def test_two_roles_with_one_key_are_refused(directory: Path) -> None:
    """Else the talker could come where only the thinker may."""
    public_file(directory, "talker").write_bytes(public_file(directory, "thinker").read_bytes())
    with pytest.raises(ConfigError, match="two roles have the same key"):
        load_keys(directory, "gateway")


def test_a_secret_of_another_pair_is_refused(directory: Path) -> None:
    secret_file(directory, "talker").write_bytes(secret_file(directory, "thinker").read_bytes())
    with pytest.raises(ConfigError, match=r"talker\.key_secret does not belong to .*talker\.key:"):
        load_keys(directory, "talker")


def test_what_is_no_file_is_refused_without_waiting(directory: Path) -> None:
    path = public_file(directory, "talker")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"talker\.key is no file"):
        load_keys(directory, "talker")
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"talker\.key is no file|Is a directory"):
        load_keys(directory, "talker")


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b'public-key = ""', b"public-key = " + b"0" * 40])
def test_what_holds_no_key_is_refused(directory: Path, content: bytes) -> None:
    """Any content at all: ``tests/fuzz/targets/config.py``."""
    public_file(directory, "talker").write_bytes(content)
    with pytest.raises(ConfigError, match=r"talker\.key holds no key of CURVE"):
        load_keys(directory, "gateway")


def test_a_directory_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"the keys cannot be written: .*: (File exists|Not a directory)"):
        make_keys(tmp_path / "file", replace=False)


def test_a_zeromq_without_curve_is_told_before_anything_else(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    for attempt in (lambda: make_keys(tmp_path, replace=False), lambda: load_keys(tmp_path, "gateway")):
        with pytest.raises(
            ConfigError, match="this ZeroMQ was built without CURVE: install pyzmq's own wheel"
        ):
            attempt()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "password",
        "wrong server key",
        "unknown key",
        "key of a role that does not send here",
        "public key of another without its secret",
    ],
)
def test_a_stranger_delivers_nothing_is_told_of_once_and_counted_and_members_are_served(
    opened: Open, directory: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, reason = attempts(directory)[kind]
    context = opened("talker")
    queue = inbox(context)
    push = outbox(opened("thinker"), queue, "talker")
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"), zmq.Context() as outside:
        stranger = Stranger(outside, endpoint(queue.socket), **options)
        for count in range(1, RETRIES + 1):
            wait_until(lambda count=count: count_of(context, reason) >= count)  # type: ignore[misc]
            assert not stranger.delivered()
            check_passes(push, queue, HELLO)
            if count < RETRIES:
                stranger.again()
        reasons = set(guard(context).refused)
        stranger.close()
    # Who does not use CURVE may hang up before it is told that it should.
    assert reasons <= ({reason, "handshake"} if reason == "no_curve" else {reason})
    refusals = [message for message in caplog.messages if "a connection was refused: " in message]
    assert len(refusals) == len(set(refusals)) == len(caplog.messages) <= len(reasons)
    assert not list(queue.drain())


def test_the_log_names_a_stranger_by_key_and_address_and_a_member_by_role(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = opened("talker")
    queue = inbox(context)
    known = attempts(directory)
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"), zmq.Context() as outside:
        for kind in ("unknown key", "key of a role that does not send here"):
            options = known[kind][0]
            named = f"(127.0.0.1, key {options['CURVE_PUBLICKEY'].decode()}, "
            stranger = Stranger(outside, endpoint(queue.socket), **options)
            # Others may come between: a stranger that tries again is closed in its handshake.
            wait_until(lambda named=named: named in caplog.text)  # type: ignore[misc]
            stranger.close()
            assert options["CURVE_SECRETKEY"].decode() not in caplog.text
    first, second = (message for message in caplog.messages if ", key " in message)
    assert f"in no *.key file of {directory}" in first
    assert "the token2wav's, which does not send to the talker" in second


def test_a_peer_that_speaks_an_older_protocol_is_not_let_in(opened: Open) -> None:
    """ZMTP 1 and 2 know no mechanism; nobody may get around keys by speaking them."""
    context = opened("talker")
    queue = inbox(context)
    frame = VERSION_BYTE + encode(HELLO)[0][1:]
    signature = b"\xff" + (1).to_bytes(8, "big") + b"\x7f"
    older = [
        # ZMTP 1.0: an anonymous identity, and a short frame.
        b"\x01\x00" + bytes([len(frame) + 1, 0]) + frame,
        # ZMTP 2.0: signature, revision, socket type PUSH, an empty identity, and a short frame.
        signature + b"\x01\x08" + b"\x00\x00" + bytes([0, len(frame)]) + frame,
        # ZMTP 3.0 that asks for no mechanism, and does not wait for an answer.
        signature + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + bytes([0, len(frame)]) + frame,
    ]
    for data in older:
        with socket.create_connection(("127.0.0.1", port_of(endpoint(queue.socket)))) as connection:
            connection.settimeout(DEADLINE_S)
            connection.sendall(data)
            read_all(connection)
    push = outbox(opened("thinker"), queue, "talker")
    check_passes(push, queue, HELLO)
    assert not list(queue.drain())
    assert queue.received.messages == 1


def test_a_peer_that_says_nothing_keeps_nobody_out(opened: Open) -> None:
    context = opened("talker")
    queue = inbox(context)
    silent = [socket.create_connection(("127.0.0.1", port_of(endpoint(queue.socket)))) for _ in range(50)]
    push = outbox(opened("thinker"), queue, "talker")
    check_passes(push, queue, HELLO)
    for each in silent:
        each.close()
    wait_until(lambda: guard(context).refused["handshake"] >= len(silent))


def test_a_plain_peer_that_does_not_wait_is_hung_up_on(opened: Open) -> None:
    queue = inbox(opened("talker"))
    with (
        socket.create_connection(("127.0.0.1", port_of(endpoint(queue.socket)))) as connection,
        pytest.raises((AssertionError, ConnectionResetError, BrokenPipeError)),
    ):
        RawPeer(None, b"PUSH", connection)


def test_without_an_answer_to_who_may_connect_nobody_does(opened: Open, monkeypatch: Patch) -> None:
    """libzmq's own default is the opposite: no answer, everybody is welcome."""
    monkeypatch.setattr(ConnectionGuard, "run", lambda self: (self._zap.close(), self._calls.close()))
    monkeypatch.setattr(ConnectionGuard, "_watch", lambda *_: None)
    context = opened("talker")
    guard(context).join()
    queue = inbox(context)
    push = outbox(opened("thinker"), queue, "talker")
    push.put(HELLO)
    monitor = queue.socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    assert monitor.poll(int(DEADLINE_S * 1000))
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    assert push.backlog_bytes
    queue.socket.disable_monitor()
    monitor.close()
