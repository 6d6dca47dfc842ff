"""Deployments in which each run is a container or a pod of its own, checked by the packages that would start them."""

from pathlib import Path
from typing import Any, cast

import kubernetes
import pytest
import yaml
from dagster._core.launcher.base import RunLauncher
from dagster._serdes import ConfigurableClassData
from dagster_docker import DockerRunLauncher
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job
from dagster_k8s.models import k8s_model_from_dict, k8s_snake_case_dict

from pgwal_pipeline.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_instance_for_containers_is_the_other_one_with_a_launcher() -> None:
    instance = loaded("deploy/dagster.runs.yaml")
    launcher = instance.pop("run_launcher")
    assert instance == loaded("deploy/dagster.yaml")
    data = ConfigurableClassData(launcher["module"], launcher["class"], yaml.safe_dump(launcher["config"]))
    made = data.rehydrate(as_type=RunLauncher)
    assert isinstance(made, DockerRunLauncher)


@pytest.fixture
def values() -> dict[str, Any]:
    return loaded("deploy/kubernetes/values.yaml")


def pod_of_a_run(values: dict[str, Any]) -> dict[str, Any]:
    """The job that Dagster makes for a run, with what the chart hands to the launcher and to the code server."""
    (code,) = values["dagster-user-deployments"]["deployments"]
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    of_the_code = {
        "env": code["env"],
        "env_secrets": [secret["name"] for secret in code["envSecrets"]],
        "volumes": code["volumes"],
        "volume_mounts": code["volumeMounts"],
        "security_context": code["securityContext"],
    }
    of_the_launcher = {
        "run_k8s_config": {
            "container_config": launcher["runK8sConfig"]["containerConfig"],
            "pod_spec_config": launcher["runK8sConfig"]["podSpecConfig"],
            "job_spec_config": launcher["runK8sConfig"]["jobSpecConfig"],
        }
    }
    first, second = (K8sContainerContext.create_from_config({"k8s": given}) for given in (of_the_launcher, of_the_code))
    context = first.merge(second)
    config = DagsterK8sJobConfig(
        job_image=f"{code['image']['repository']}:{code['image']['tag']}",
        dagster_home=values["global"]["dagsterHome"],
        image_pull_policy=launcher["imagePullPolicy"],
        instance_config_map="pgwal-dagster-instance",
    )
    command = ["dagster", "api", "execute_run", "{}"]
    job = construct_dagster_k8s_job(config, command, "run", user_defined_k8s_config=context.run_k8s_config)
    return cast(dict[str, Any], kubernetes.client.ApiClient().sanitize_for_serialization(job))


def test_a_run_in_a_pod_reaches_the_lake_and_is_never_started_twice(values: dict[str, Any]) -> None:
    spec = pod_of_a_run(values)["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["activeDeadlineSeconds"] == loaded("deploy/dagster.yaml")["run_monitoring"]["max_runtime_seconds"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["resources"]["limits"]["memory"]
    assert environment["DAGSTER_HOME"] == values["global"]["dagsterHome"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (claimed,) = (volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume)
    assert environment["PGWAL_LAKE"] == mounted[claimed]
    settings = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    assert {name for name in settings if name.removeprefix(PREFIX).lower() not in Settings.model_fields} == set()
    assert Settings.from_environment(settings).spark_idle == 0
    assert container["envFrom"] == [{"secretRef": {"name": "pgwal"}}]


def test_manifests_have_the_names_that_the_values_use(values: dict[str, Any]) -> None:
    """Each field is one that Kubernetes knows."""
    kinds = {}
    for path in sorted(KUBERNETES.glob("*.yaml")):
        manifest = yaml.safe_load(path.read_text())
        if path.name != "values.yaml":
            model = getattr(kubernetes.client, f"V1{manifest['kind']}")
            k8s_model_from_dict(model, k8s_snake_case_dict(model, manifest))
            kinds[manifest["kind"]] = manifest
    (code,) = values["dagster-user-deployments"]["deployments"]
    assert code["envSecrets"] == [{"name": kinds["Secret"]["metadata"]["name"]}]
    assert code["volumes"][0]["persistentVolumeClaim"]["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert kinds["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert {"PGWAL_SOURCE_DSN", "PGPASSWORD"} <= kinds["Secret"]["stringData"].keys()


def test_the_chart_gets_the_limits_of_the_other_deployments(values: dict[str, Any]) -> None:
    queue = values["dagsterDaemon"]["runCoordinator"]["config"]["queuedRunCoordinator"]
    instance = loaded("deploy/dagster.yaml")
    assert queue["tagConcurrencyLimits"] == instance["concurrency"]["runs"]["tag_concurrency_limits"]
    assert queue["maxConcurrentRuns"] == instance["concurrency"]["runs"]["max_concurrent_runs"]
    # What the schema of the chart has; it takes no other names there.
    assert set(queue) <= {"maxConcurrentRuns", "tagConcurrencyLimits", "dequeueIntervalSeconds", "dequeueNumWorkers", "dequeueUseThreads"}
    assert set(values["runLauncher"]["config"]["k8sRunLauncher"]) <= {
        "image", "imagePullPolicy", "jobNamespace", "loadInclusterConfig", "kubeconfigFile", "envConfigMaps", "envSecrets", "envVars",
        "volumeMounts", "volumes", "labels", "failPodOnRunFailure", "resources", "schedulerName", "securityContext", "runK8sConfig",
    }  # fmt: skip
    assert set(values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]) <= {
        "containerConfig", "podSpecConfig", "podTemplateSpecMetadata", "jobSpecConfig", "jobMetadata",
    }  # fmt: skip
    assert set(values["dagsterDaemon"]) <= {"runCoordinator", "runMonitoring", "runRetries"}
