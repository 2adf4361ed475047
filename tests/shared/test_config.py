"""The configuration: what is taken, what is refused, and that nothing in it is ever executed."""

import re
from pathlib import Path

import pytest

from omnirelay.errors import ConfigError
from shared.config import Config, load_config
from shared.messages import STAGES


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "config.yaml"

    def write_text(text: str) -> Path:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return path

    return write_text


def test_without_file_and_environment_the_defaults_serve(write):
    config = load_config(None, {})
    assert config == load_config(write("# nothing yet\n"), {}) == Config()
    assert config.gateway.listen == "tcp://127.0.0.1:5555"
    addresses = [config.stage(name).inbox for name in STAGES]
    addresses += [config.gateway.listen, config.gateway.events, config.gateway.control]
    addresses += [config.gateway.http or "", *(config.stage(name).http or "" for name in STAGES)]
    assert len(set(addresses)) == 10
    assert all(address.startswith("tcp://127.0.0.1:") for address in addresses)


def test_a_stage_can_do_without_an_http_endpoint():
    config = load_config(None, {"OMNIRELAY_STAGES__TALKER__HTTP": "null"})
    assert config.stages.talker.http is None
    assert config.stages.thinker.http is not None
    with pytest.raises(ConfigError, match=r"stages\.talker\.http"):
        load_config(None, {"OMNIRELAY_STAGES__TALKER__HTTP": "ipc:///tmp/talker"})


def test_values_of_the_file_are_taken(write):
    path = write(
        """
        model: Qwen/Qwen2.5-Omni-3B
        log_level: debug
        gateway:
          listen: tcp://0.0.0.0:7000
          control: ipc:///run/omnirelay/control
          limits: {max_active: 3, deadline_s: 5}
        stages:
          thinker: {engine: {dtype: bfloat16, max_model_len: 4096}}
          talker: {devices: "0,1"}
          token2wav: {devices: 0, synthesis: {sway_coefficient: null}}
        """
    )
    config = load_config(path, {})
    assert config.model == "Qwen/Qwen2.5-Omni-3B"
    assert config.gateway.listen == "tcp://0.0.0.0:7000"
    assert config.gateway.control == "ipc:///run/omnirelay/control"
    assert (config.gateway.limits.max_active, config.gateway.limits.deadline_s) == (3, 5.0)
    assert config.stages.thinker.engine.max_model_len == 4096
    assert (config.stages.talker.devices, config.stages.token2wav.devices) == ("0,1", "0")
    assert config.stages.token2wav.synthesis.sway_coefficient is None
    assert config.stages.thinker.inbox == Config().stages.thinker.inbox


def test_every_problem_is_listed_at_once(write):
    path = write(
        """
        modle: x
        gateway: {limits: {max_active: many, max_queue: 3}}
        stages:
          thinker: {engine: {dtype: float64}}
          talker: {threads: 0}
          vocoder: {}
        """
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    message = str(caught.value)
    assert str(path) in message
    for key in (
        "modle: no such key, did you mean model?",
        "gateway.limits.max_active: Input should be a valid integer",
        "gateway.limits.max_queue: no such key, did you mean gateway.limits.max_queued?",
        "stages.thinker.engine.dtype: Input should be 'auto'",
        "stages.talker.threads: Input should be greater than 0",
        "stages.vocoder: no such key",
    ):
        assert key in message
    assert "\n" not in message


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIRELAY_STAGES__TALKER__THREADS", "0")
    monkeypatch.setenv("OMNIRELAY_FOO", "1")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert "stages.talker.threads (set by OMNIRELAY_STAGES__TALKER__THREADS): Input" in str(caught.value)
    assert "foo (set by OMNIRELAY_FOO): no such key" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gateway: {}\nmodel: x\ngateway: {}", "line 3 repeats the key 'gateway' of line 1"),
        ("gateway:\n  http: null\n  'http': null", "line 3 repeats the key 'http' of line 2"),
        ("stages: {talker: {threads: 1, threads: 2}}", "line 1 repeats the key 'threads' of line 1"),
        ("- 1", "must hold a mapping of keys, not a"),
        ("word", "must hold a mapping of keys, not a"),
        ("gateway: {lisen: tcp://127.0.0.1:1}", ": no such key, did you mean gateway.listen?"),
        ("gateway: {max_active: 3}", ": no such key, did you mean gateway.limits.max_active?"),
        ("stages: {token2vaw: {}}", ": no such key, did you mean stages.token2wav?"),
        ("stages: {talker: {engine: {dtyp: auto}}}", "did you mean stages.talker.engine.dtype?"),
        ("max_item_bytes: 1", ": no such key, did you mean media.max_item_bytes?"),
        (
            "stages: {token2wav: {engine: {tensor_parallel_size: 2}}}",
            "engine.tensor_parallel_size does not exist: ",
        ),
    ],
)
def test_a_key_or_a_file_that_cannot_be_used_is_told(write, text, told):
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), {})
    assert told in str(caught.value)


def test_a_merged_mapping_may_be_overridden_key_by_key(write):
    path = write(
        """
        stages:
          thinker: &all {threads: 2, niceness: 3, engine: {dtype: float32}}
          talker: {<<: *all, threads: 4}
        """
    )
    stages = load_config(path, {"OMNIRELAY_STAGES__TALKER__ENGINE__DTYPE": "bfloat16"}).stages
    assert (stages.talker.threads, stages.talker.niceness) == (4, 3)
    assert (stages.talker.engine.dtype, stages.thinker.engine.dtype) == ("bfloat16", "float32")


def test_a_removed_key_is_refused_with_what_became_of_it(write):
    path = write("stages: {talker: {prompt_mode: padded, threads: 0}}")
    for file, environment in ((path, {}), (None, {"OMNIRELAY_STAGES__TALKER__PROMPT_MODE": "padded"})):
        with pytest.raises(ConfigError) as caught:
            load_config(file, environment)
        message = str(caught.value)
        assert "stages.talker.prompt_mode was removed: every prompt is computed as the released" in message
        assert ("stages.talker.threads: Input should be greater than 0" in message) is (file is not None)


def test_every_key_that_an_upgrade_removed_says_so(write):
    page = (Path(__file__).parents[2] / "docs/upgrading.md").read_text("utf-8")
    (section,) = re.findall(r"### Removed keys\n(.*?)###", page, re.DOTALL)
    removed = re.findall(r"`(stages\.[\w.]+)`", "".join(re.findall(r"^\|[^|]*", section, re.MULTILINE)))
    assert len(removed) == 4
    for key in removed:
        sections = key.split(".")
        with pytest.raises(ConfigError, match=f"{key} was removed"):
            load_config(write("{" + ": {".join(sections) + ": 1" + "}" * len(sections)), {})


@pytest.mark.parametrize(
    "text",
    [
        "gateway: {limits: {max_active: true}}",
        "gateway: {limits: {max_active: '3'}}",
        "gateway: {limits: {max_active: 3.0}}",
        "gateway: {heartbeat_timeout_s: .inf}",
        "gateway: {heartbeat_timeout_s: .nan}",
        "gateway: {listen: 5555}",
        "gateway: tcp://127.0.0.1:5555",
        "gateway:",
        "stages: {talker: {engine: {enforce_eager: 'yes'}}}",
        "stages: {talker: {devices: true}}",
        "stages: {talker: {heartbeat_s: 0}}",
        "stages: {token2wav: {synthesis: {time_points: 1}}}",
        "stages: {thinker: {synthesis: {}}}",
        "model: [a]",
        "log_level: chatty",
        "1: 2",
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(write, text):
    with pytest.raises(ConfigError, match="with environment overrides"):
        load_config(write(text), {})


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:5555",
        "tcp://127.0.0.1",
        "tcp://:5555",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:\N{ARABIC-INDIC DIGIT FIVE}",
        "tcp://two words:5555",
        "tcp://127.0.0.1:5555\n",
        "udp://127.0.0.1:5555",
        "ipc://",
        "ipc:///tmp/x",
        "",
    ],
)
def test_an_address_that_is_none_is_refused_and_named(address):
    with pytest.raises(ConfigError, match=r"gateway\.listen: .* is not tcp://HOST:PORT"):
        load_config(None, {"OMNIRELAY_GATEWAY__LISTEN": f"{address!r}" if address.isascii() else address})


@pytest.mark.parametrize(
    ("key", "address"),
    [
        *(("listen", address) for address in ("tcp://host-a:1", "tcp://[::1]:65535", "tcp://*:5555")),
        # Nobody on another machine reaches these, so that they need no keys.
        *(("events", address) for address in ("ipc:///tmp/x", "tcp://localhost:5560")),
        *(("events", address) for address in ("tcp://127.9.9.9:1", "tcp://[::1]:1")),
    ],
)
def test_an_address_that_is_one_is_taken(key, address):
    config = load_config(None, {f"OMNIRELAY_GATEWAY__{key.upper()}": f"'{address}'"})
    assert getattr(config.gateway, key) == address


def test_an_address_that_is_told_to_others_needs_keys_as_well():
    with pytest.raises(ConfigError, match=r"stages\.talker\.advertise tcp://far:1, "):
        load_config(None, {"OMNIRELAY_STAGES__TALKER__ADVERTISE": "tcp://far:1"})


@pytest.mark.parametrize(
    "key", ["GATEWAY__EVENTS", "GATEWAY__CONTROL", *(f"STAGES__{name.upper()}__INBOX" for name in STAGES)]
)
@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:5560",
        "tcp://*:5560",
        "tcp://[::]:5560",
        "tcp://gateway:5560",
        "tcp://10.0.0.7:5560",
        "tcp://eth0:5560",
        "tcp://127.0.0.1.example.com:5560",
        # ZeroMQ reads what is before the semicolon as the address to send from.
        "tcp://127.0.0.1:0;10.0.0.7:5560",
    ],
)
def test_an_address_that_others_reach_needs_keys_or_a_word_that_nobody_does(key, address):
    override = {f"OMNIRELAY_{key}": f"'{address}'"}
    with pytest.raises(ConfigError) as caught:
        load_config(None, override)
    name = ".".join(key.lower().split("__"))
    assert f"other machines can reach {name} {address}, " in str(caught.value)
    assert "`omnirelay keys DIR`" in str(caught.value)
    assert load_config(None, override | {"OMNIRELAY_SECURITY__KEYS": "keys"}).security.keys == "keys"
    assert load_config(None, override | {"OMNIRELAY_SECURITY__INTERNAL_NETWORK": "true"})
    for unset in ({"OMNIRELAY_SECURITY__KEYS": "''"}, {"OMNIRELAY_SECURITY__INTERNAL_NETWORK": "false"}):
        with pytest.raises(ConfigError):
            load_config(None, override | unset)


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("MEDIA__MAX_ITEM_BYTES", 2**27, "stages.thinker.max_payload_bytes"),
        ("GATEWAY__LIMITS__REQUEST_BYTES", 2**20, "gateway.limits.request_bytes"),
        ("GATEWAY__LIMITS__HELD_BYTES", 2**20, "gateway.limits.held_bytes"),
    ],
)
def test_media_must_fit_where_they_are_kept_and_sent(key, value, other):
    with pytest.raises(ConfigError, match=rf"media\.max_\w+_bytes must not exceed {other}"):
        load_config(None, {f"OMNIRELAY_{key}": str(value)})


def test_the_environment_overrides_the_file(write):
    path = write("model: from-file\nlog_level: error\ngateway: {limits: {max_active: 3, max_queued: 7}}")
    environment = {
        "OMNIRELAY_GATEWAY__LIMITS__MAX_ACTIVE": "5",
        "OMNIRELAY_STAGES__TALKER__ENGINE__ENFORCE_EAGER": "true",
        "OMNIRELAY_STAGES__TALKER": "{threads: 2, engine: {enforce_eager: false}}",
        "OMNIRELAY_STAGES__THINKER__ENGINE__MAX_MODEL_LEN": "null",
        "OMNIRELAY_STAGES__THINKER__DEVICES": "0",
        "OMNI_MODEL": "2024-99-99: any text, since it is no YAML",
        "OTHER_LOG_LEVEL": "debug",
    }
    before = dict(environment)
    config = load_config(path, environment)
    assert config.model == environment["OMNI_MODEL"]
    assert config.log_level == "error"
    assert (config.gateway.limits.max_active, config.gateway.limits.max_queued) == (5, 7)
    assert (config.stages.talker.engine.enforce_eager, config.stages.talker.threads) == (True, 2)
    assert config.stages.thinker.engine.max_model_len is None
    assert config.stages.thinker.devices == "0"
    assert environment == before


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("OMNI_MODEL", "/models/omni")
    assert load_config().model == "/models/omni"
    monkeypatch.setenv("OMNI_MODEL", "")
    assert load_config().model is None


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("OMNIRELAY_GATWAY__LISTEN", "x", r"gatway: no such key, did you mean gateway\?"),
        ("OMNIRELAY_", "x", r"no such key"),
        ("OMNIRELAY_MODEL__NAME", "x", r"OMNIRELAY_MODEL__NAME: model is a value, not a section"),
        ("OMNIRELAY_LOG_LEVEL", "[", r"OMNIRELAY_LOG_LEVEL='\[' is not a YAML value"),
        ("OMNIRELAY_LOG_LEVEL", "2024-99-99", r"is not a YAML value: month must be in"),
        ("OMNIRELAY_LOG_LEVEL", "!!python/name:os.system", r"is not a YAML value"),
    ],
)
def test_an_override_that_cannot_be_used_is_named(write, name, value, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(write("model: x"), {name: value})


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir ['{target}']",
        "!!python/object/new:os.mkdir ['{target}']",
        "!!python/name:os.mkdir",
        "!!python/module:antigravity",
        "!import os",
    ],
)
def test_a_tag_that_names_code_is_refused_and_not_executed(write, tmp_path, value):
    target = tmp_path / "made"
    text = value.replace("{target}", str(target))
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(write(f"model: {text}"), {})
    with pytest.raises(ConfigError, match="is not a YAML value"):
        load_config(None, {"OMNIRELAY_MODEL": text})
    assert not target.exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "model: 2024-99-99",
        "model: !!int x",
        "model: !!bool x",
        "model: !!timestamp x",
        "model: " + "9" * 5000,
        "a: " + "[" * 5000,
        "? [a]\n: 1",
        "\0",
        "model: {<<: 1}",
        "model: Qualit\udce4t",
    ],
)
def test_a_file_that_is_not_yaml_is_refused_in_one_line(write, text):
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        load_config(write(text), {})
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml: No such file"):
        load_config(tmp_path / "missing.yaml", {})
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load_config(tmp_path, {})


def test_each_gateway_of_a_machine_has_ports_of_its_own() -> None:
    config = Config.model_validate({"gateway": {"replicas": 3, "http": None, "events": "ipc:///run/events"}})
    assert config.gateway.own_addresses(1) == {
        key: getattr(config.gateway, key) for key in ("listen", "events", "control", "http", "monitor")
    }
    assert config.gateway.own_addresses(3) == {
        "listen": "tcp://127.0.0.1:5755",
        "events": "ipc:///run/events.3",
        "control": "tcp://127.0.0.1:5761",
        "http": None,
        "monitor": "tcp://127.0.0.1:5771",
    }
    assert [(each.events, each.control) for each in config.gateway.addresses] == [
        ("ipc:///run/events", "tcp://127.0.0.1:5561"),
        ("ipc:///run/events.2", "tcp://127.0.0.1:5661"),
        ("ipc:///run/events.3", "tcp://127.0.0.1:5761"),
    ]


def test_gateways_elsewhere_are_listed_and_each_is_joined_once() -> None:
    other = {"events": "tcp://far:5560", "control": "tcp://far:5561"}
    values = {"security": {"internal_network": True}, "gateway": {"others": [other, other]}}
    config = Config.model_validate(values)
    assert [each.control for each in config.gateway.addresses] == ["tcp://127.0.0.1:5561", "tcp://far:5561"]
    with pytest.raises(ValueError, match=r"other machines can reach gateway.others.0.events"):
        Config.model_validate({"gateway": {"others": [other]}})
    variable = '[{events: "tcp://far:5560", control: "tcp://far:5561"}]'
    environment = {"OMNIRELAY_GATEWAY__OTHERS": variable, "OMNIRELAY_SECURITY__INTERNAL_NETWORK": "true"}
    assert load_config(None, environment).gateway.addresses == config.gateway.addresses


def test_ports_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"listen of gateway 3: 'tcp://127.0.0.1:65600'"):
        Config.model_validate({"gateway": {"replicas": 3, "listen": "tcp://127.0.0.1:65400"}})
