# SPDX-License-Identifier: Apache-2.0
"""The files of server/packaging: what they start does start, and systemd finds the service closed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server_process import ROOT, Client, Server, binary

PACKAGING = ROOT / "server" / "packaging"
ANALYZE = shutil.which("systemd-analyze")
#: 10 is all of the machine; what talks to a network is at best about 1.
MOST_EXPOSURE = 1.5


def service_of(tmp_path: Path) -> str:
    """The service as it is, but for the places of the program and of its data."""
    text = (PACKAGING / "memscale-server.service").read_text()
    assert text.count("/usr/local/bin/memscale-server ") == 1 and "%S/memscale-server" in text
    return text.replace("/usr/local/bin/memscale-server ", f"{binary()} ").replace(
        "%S/memscale-server", str(tmp_path / "data")
    )


def test_the_services_command_line_serves(tmp_path: Path) -> None:
    line = re.search(r"^ExecStart=(.*)$", service_of(tmp_path), re.MULTILINE)
    assert line is not None
    words = line[1].replace("$MEMSCALE_SERVER_OPTIONS", "--https --host runs.example.org").split()
    words[words.index("127.0.0.1:8300")] = "127.0.0.1:0"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = re.search(r":(\d+)$", process.stdout.readline().rstrip())
        assert port is not None
        client = Client(int(port[1]), headers={"Host": "runs.example.org"})
        assert client.ask("GET", "/readyz").status == 200
        client.close()
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_service_and_finds_it_closed(tmp_path: Path) -> None:
    service = tmp_path / "memscale-server.service"
    service.write_text(service_of(tmp_path))
    service.chmod(0o644)
    assert ANALYZE is not None
    checked = subprocess.run([ANALYZE, "verify", str(service)], capture_output=True, text=True, check=False)
    about_it = [line for line in checked.stderr.splitlines() if service.name in line]
    assert checked.returncode == 0 and about_it == [], checked.stderr
    line = [ANALYZE, "security", "--offline=true", "--no-pager", str(service)]
    said = subprocess.run(line, capture_output=True, text=True, check=False).stdout
    level = re.search(r"exposure level for .*: ([\d.]+)", said)
    assert level is not None and float(level[1]) <= MOST_EXPOSURE, said


def dockerfile() -> dict[str, list[str]]:
    """Instructions of the last stage of the Dockerfile."""
    text = (PACKAGING / "Dockerfile").read_text().replace("\\\n", " ")
    last = text[text.rindex("\nFROM ") :]
    found: dict[str, list[str]] = {}
    for line in last.splitlines():
        name, _, rest = line.partition(" ")
        if name.isupper():
            found.setdefault(name, []).append(rest.strip())
    return found


def test_the_image_has_a_user_and_its_health_is_asked_as_written(server: Server, tmp_path: Path) -> None:
    image = dockerfile()
    assert image["USER"] == ["memscale"] and image["VOLUME"] == ["/data"]
    (entry,) = image["ENTRYPOINT"]
    options = json.loads(entry)[1:]
    assert options == ["--data", "/data", "--listen", "0.0.0.0:8300"]
    (health,) = image["HEALTHCHECK"]
    words = json.loads(health.partition("CMD ")[2])
    here = [word.replace("/8300", f"/{server.port}") for word in words]
    assert here != words
    assert subprocess.run(here, timeout=60, check=False).returncode == 0
    server.stop()
    assert subprocess.run(here, timeout=60, check=False, capture_output=True).returncode != 0


def test_what_the_image_copies_is_there() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (PACKAGING / "Dockerfile").read_text(), re.MULTILINE)
    allowed = (PACKAGING / "Dockerfile.dockerignore").read_text().split()
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
        assert any(
            path == entry[1:] or path.startswith(f"{entry[1:]}/") for entry in allowed if entry[0] == "!"
        )
