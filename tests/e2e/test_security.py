"""Keys, sizes, and what errors do not reveal."""

from __future__ import annotations

import httpx
import pytest

from e2e.live_server import start, tiny_generator
from paceline.errors import ConfigError
from paceline.server.limits import read_keys

KEY = "k" * 32
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(target_of, tokenizer):
    server = start(
        tiny_generator(target_of("llama"), tokenizer),
        keys=(KEY.encode(), b"another key that works"),
        max_body_bytes=20_000,
    )
    yield server
    server.stop()


@pytest.mark.parametrize("header", [None, "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \u00e9"])
def test_without_a_key_nobody_is_let_in(guarded, header):
    headers = {} if header is None else {"Authorization": header.encode()}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
    ):
        found = httpx.request(method, f"{guarded.url}{path}", headers=headers, json=BODY)
        assert found.status_code == 401
        assert found.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", [KEY, "another key that works"])
def test_with_a_key_one_is(guarded, key):
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.post(f"{guarded.url}/v1/chat/completions", headers=headers, json=BODY).status_code == 200


def test_probes_need_no_key(guarded):
    assert httpx.get(f"{guarded.url}/health").json() == {"status": "ok"}
    assert "version" in httpx.get(f"{guarded.url}/version").json()


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_beyond_the_limit_are_refused(guarded, chunked):
    body = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    content = iter([body[:10_000], body[10_000:]]) if chunked else body
    headers = {"Authorization": f"Bearer {KEY}", "content-type": "application/json"}
    found = httpx.post(f"{guarded.url}/v1/completions", headers=headers, content=content)
    assert found.status_code == 413
    assert "20000" in found.json()["error"]["message"]


def test_no_path_or_code_can_be_named_by_a_request(live):
    for name in ("/etc/passwd", "phrase:/tmp", "os.system", "../../x"):
        for options in ({"drafter": name}, {"verifier": name}):
            found = httpx.post(f"{live.url}/v1/chat/completions", json=BODY | {"paceline": options})
            assert found.status_code == 400


@pytest.mark.parametrize("path", ["/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd"])
def test_only_the_playgrounds_own_files_are_served(live, path):
    with httpx.Client() as client:
        request = client.build_request("GET", f"{live.url}{path}")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert client.send(request).status_code in {404, 405}


def test_the_page_comes_with_a_policy_that_keeps_it_to_itself(live):
    found = httpx.get(f"{live.url}/")
    assert "default-src 'self'" in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"


def test_deeply_nested_json_is_refused(live):
    body = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    found = httpx.post(
        f"{live.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert found.status_code == 400


def test_keys_are_read_from_a_file_and_short_ones_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# the team\n{KEY}\n\n")
    assert read_keys(file) == (KEY.encode(),)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="a key of 5 characters: at least 16"):
        read_keys(file)
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(file)
    with pytest.raises(ConfigError, match=f"{tmp_path}/missing cannot be read: No such file"):
        read_keys(tmp_path / "missing")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        read_keys(file)
