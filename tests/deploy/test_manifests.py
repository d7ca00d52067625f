"""The deployment files are true: they render, they are valid, and they set only what the configuration knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import msgspec
import pytest
import yaml

from schemas.subjects import SERVICES
from services.kit.config import CLIENT_KEYS, Config

ROOT = Path(__file__).parents[2]
COMPOSE = sorted((ROOT / "compose").glob("*.yaml"))
KUBECTL = Path(sys.executable).parent / "kubectl"


def known_setting(name: str) -> bool:
    fields = {field.name for field in msgspec.structs.fields(Config)}
    key = name.removeprefix("QL3_").lower()
    return key in fields or key.removesuffix("_file") in fields or key.upper() in CLIENT_KEYS


def rendered() -> list[dict[str, Any]]:
    result = subprocess.run(
        [str(KUBECTL), "kustomize", str(ROOT / "k8s" / "base")], capture_output=True, text=True, check=True, timeout=60
    )
    return list(yaml.safe_load_all(result.stdout))


def compose_environment(path: Path) -> dict[str, dict[str, str]]:
    services = yaml.safe_load(path.read_text())["services"]
    return {name: service.get("environment") or {} for name, service in services.items()}


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_holds_to_the_compose_specification(path: Path) -> None:
    options = compose_spec.PyOptions()
    options.apply_merge = True
    options.from_yaml(path.read_text()).validate()


def test_the_compose_check_can_fail() -> None:
    with pytest.raises(Exception, match=r"(?i)imagee|unknown|extra"):
        compose_spec.PyOptions().from_yaml("services:\n  a:\n    imagee: x\n").validate()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_sets_only_settings_that_exist(path: Path) -> None:
    for service, environment in compose_environment(path).items():
        unknown = [name for name in environment if name.startswith("QL3_") and not known_setting(name)]
        assert unknown == [], service


def test_standalone_runs_every_service() -> None:
    services = yaml.safe_load((ROOT / "compose" / "standalone.yaml").read_text())["services"]
    assert set(SERVICES) <= set(services)
    for name in SERVICES:
        assert services[name]["command"][:2] == ["serve", name]


def test_every_kubernetes_object_is_valid() -> None:
    objects = rendered()
    assert len(objects) > 10
    for thing in objects:
        kubernetes_validate.validate(thing, "1.33", strict=True)


def test_every_service_has_its_own_workload_and_runs_without_rights() -> None:
    workloads = {
        thing["metadata"]["labels"]["app.kubernetes.io/component"]: thing["spec"]["template"]["spec"]
        for thing in rendered()
        if thing["kind"] in ("Deployment", "StatefulSet")
    }
    assert set(workloads) == set(SERVICES)
    for name, pod in workloads.items():
        container = pod["containers"][0]
        assert container["args"][:2] == ["serve", name]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_in_kubernetes_logs_go_to_an_object_store_with_keys_of_their_own() -> None:
    things = rendered()
    assert not [thing for thing in things if thing["kind"] == "PersistentVolumeClaim"]
    (config,) = [thing["data"] for thing in things if thing["kind"] == "ConfigMap"]
    assert config["QL3_ARTIFACTS_URL"].startswith("s3://")
    keys = {
        thing["metadata"]["name"]: source["secretRef"]["name"]
        for thing in things
        if thing["kind"] in ("Deployment", "StatefulSet")
        for source in thing["spec"]["template"]["spec"]["containers"][0].get("envFrom", [])
        if "secretRef" in source
    }
    assert keys == {"ql3-retention": "ql3-artifacts", "ql3-worker": "ql3-artifacts-worker"}


def test_kubernetes_sets_only_settings_that_exist() -> None:
    for thing in rendered():
        if thing["kind"] == "ConfigMap":
            assert [name for name in thing["data"] if not known_setting(name)] == []
        if thing["kind"] in ("Deployment", "StatefulSet", "Job"):
            names = [entry["name"] for entry in thing["spec"]["template"]["spec"]["containers"][0]["env"]]
            assert [name for name in names if not known_setting(name)] == []
