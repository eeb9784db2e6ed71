#!/usr/bin/env python3
"""Checks Kubernetes manifests for what their schema does not see.

    deploy_manifests.py FOLDER FILE    checks the manifests that kustomize made of deploy/kubernetes/FOLDER
    deploy_manifests.py --self-test    shows that each rule finds a fault

- A selector of a workload or Service matches the labels of a pod. A policy's own selector is not empty, and a selector of
  other systems' pods has none of our labels.
- A port that is named is a container's port. A StatefulSet's Service exists, and is headless.
- A mounted volume exists, and each volume is mounted.
- Every container has a memory limit, no privileges, a read-only root and no capability but IPC_LOCK.
- On p5: all cards and GPUs of the host, huge pages, and IPC_LOCK only for root, for whom it counts.
"""

import copy
import sys

LABEL = "app.kubernetes.io/name"
P5_LIMITS = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}


def pods(manifests):
    """The pod templates: (the workload's name, the template)."""
    for manifest in manifests:
        template = manifest.get("spec", {}).get("template")
        if template:
            yield f"{manifest['kind']}/{manifest['metadata']['name']}", manifest, template


def faults(folder, manifests):
    """Every fault, as one line."""
    templates = list(pods(manifests))
    labels = [template["metadata"]["labels"] for _, _, template in templates]

    def is_some_pod(selector):
        return bool(selector) and any(selector.items() <= found.items() for found in labels)

    ports = {
        port["name"]
        for _, _, template in templates
        for container in template["spec"]["containers"]
        for port in container.get("ports", [])
    }
    services = {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == "Service"}

    for manifest in manifests:
        name, spec = f"{manifest['kind']}/{manifest['metadata']['name']}", manifest.get("spec", {})
        if manifest["kind"] == "Service":
            if not is_some_pod(spec.get("selector")):
                yield f"{name}: selects no pod"
            for port in spec["ports"]:
                if port["targetPort"] not in ports:
                    yield f"{name}: no container has a port {port['targetPort']}"
        if manifest["kind"] == "NetworkPolicy":
            if not is_some_pod(spec["podSelector"].get("matchLabels")):
                yield f"{name}: its podSelector selects no pod of these, or all of the namespace"
            for rule in spec.get("ingress", []) + spec.get("egress", []):
                for port in rule.get("ports", []):
                    if isinstance(port["port"], str) and port["port"] not in ports:
                        yield f"{name}: no container has a port {port['port']}"
                for side in rule.get("from", []) + rule.get("to", []):
                    chosen = side.get("podSelector", {}).get("matchLabels", {})
                    if "namespaceSelector" in side and LABEL in chosen:
                        yield f"{name}: pods of another namespace do not have our label: {chosen}"
                    if "namespaceSelector" not in side and not is_some_pod(chosen):
                        yield f"{name}: {chosen} selects no pod"

    for name, manifest, template in templates:
        spec = manifest["spec"]
        if "selector" in spec and not spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
            yield f"{name}: its selector does not match its own pods"
        if manifest["kind"] == "StatefulSet":
            service = services.get(spec["serviceName"])
            if service is None or service["spec"].get("clusterIP") != "None":
                yield f"{name}: there is no headless Service {spec['serviceName']}"
        yield from pod_faults(folder, name, template["spec"])


def pod_faults(folder, name, pod):
    """The faults of one pod."""
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    mounted = set()
    is_root = pod["securityContext"].get("runAsUser") == 0
    if is_root == pod["securityContext"].get("runAsNonRoot"):
        yield f"{name}: runAsUser and runAsNonRoot contradict each other"
    for container in pod["containers"]:
        security = container.get("securityContext", {})
        capabilities = security.get("capabilities", {})
        limits = container.get("resources", {}).get("limits", {})
        if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
            yield f"{name}: may gain privileges"
        if not security.get("readOnlyRootFilesystem"):
            yield f"{name}: its root file system is not read-only"
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"IPC_LOCK"}:
            yield f"{name}: has capabilities beyond IPC_LOCK: {capabilities}"
        if "IPC_LOCK" in capabilities.get("add", []) and not is_root:
            yield f"{name}: IPC_LOCK does not count for a user who is not root"
        if "memory" not in limits:
            yield f"{name}: has no memory limit"
        if container["image"].rpartition(":")[2] in (container["image"], "latest") and folder != "base":
            yield f"{name}: its image has no version: {container['image']}"
        ports = {port["name"] for port in container.get("ports", [])}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            port = probe.get("httpGet", probe.get("tcpSocket", {})).get("port")
            if port is not None and port not in ports:
                yield f"{name}: {kind} asks a port {port} that the container does not name"
        for mount in container.get("volumeMounts", []):
            mounted.add(mount["name"])
        if folder == "p5":
            for resource, count in P5_LIMITS.items():
                if limits.get(resource) != count:
                    yield f"{name}: a p5.48xlarge has {count} {resource}, the limit is {limits.get(resource)}"
            if not any(resource.startswith("hugepages-") for resource in limits):
                yield f"{name}: no huge pages"
    if mounted != volumes:
        yield f"{name}: volumes {sorted(volumes)}, mounted {sorted(mounted)}"


def self_test():
    """Breaks a good pod in each way, and expects the fault's words."""
    good = [
        {
            "kind": "Service",
            "metadata": {"name": "s"},
            "spec": {"clusterIP": "None", "selector": {LABEL: "a"}, "ports": [{"targetPort": "p"}]},
        },
        {
            "kind": "StatefulSet",
            "metadata": {"name": "w"},
            "spec": {
                "serviceName": "s",
                "selector": {"matchLabels": {LABEL: "a"}},
                "template": {
                    "metadata": {"labels": {LABEL: "a"}},
                    "spec": {
                        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
                        "volumes": [{"name": "v"}],
                        "containers": [
                            {
                                "image": "i:1",
                                "ports": [{"name": "p"}],
                                "livenessProbe": {"httpGet": {"port": "p"}},
                                "volumeMounts": [{"name": "v"}],
                                "securityContext": {
                                    "allowPrivilegeEscalation": False,
                                    "readOnlyRootFilesystem": True,
                                    "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
                                },
                                "resources": {"limits": {"memory": "1Gi", "hugepages-2Mi": "1Gi", **P5_LIMITS}},
                            }
                        ],
                    },
                },
            },
        },
        {
            "kind": "NetworkPolicy",
            "metadata": {"name": "n"},
            "spec": {
                "podSelector": {"matchLabels": {LABEL: "a"}},
                "ingress": [{"from": [{"podSelector": {"matchLabels": {LABEL: "a"}}}], "ports": [{"port": "p"}]}],
                "egress": [{"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k": "dns"}}}]}],
            },
        },
    ]
    assert not list(faults("p5", good)), list(faults("p5", good))
    pod = (1, "spec", "template", "spec")
    container = (*pod, "containers", 0)
    breaks = {
        "Service/s: selects no pod": ((0, "spec", "selector"), {}),
        "Service/s: no container has a port": ((0, "spec", "ports", 0, "targetPort"), "q"),
        "no headless Service": ((0, "spec", "clusterIP"), "10.0.0.1"),
        "does not match its own pods": ((1, "spec", "selector", "matchLabels"), {LABEL: "b"}),
        "contradict": ((*pod, "securityContext", "runAsNonRoot"), True),
        "may gain": ((*container, "securityContext", "allowPrivilegeEscalation"), True),
        "not read-only": ((*container, "securityContext", "readOnlyRootFilesystem"), False),
        "beyond IPC_LOCK": ((*container, "securityContext", "capabilities", "add"), ["SYS_ADMIN"]),
        "does not count": ((*pod, "securityContext"), {"runAsUser": 1, "runAsNonRoot": True}),
        "no memory limit": ((*container, "resources", "limits"), {"hugepages-2Mi": "1Gi", **P5_LIMITS}),
        "no version": ((*container, "image"), "i"),
        "livenessProbe asks": ((*container, "livenessProbe", "httpGet", "port"), "q"),
        "a p5.48xlarge has 32": ((*container, "resources", "limits", "vpc.amazonaws.com/efa"), 1),
        "no huge pages": ((*container, "resources", "limits"), {"memory": "1Gi", **P5_LIMITS}),
        "mounted": ((*pod, "volumes"), []),
        "or all of the namespace": ((2, "spec", "podSelector"), {}),
        "NetworkPolicy/n: no container": ((2, "spec", "ingress", 0, "ports", 0, "port"), "q"),
        "NetworkPolicy/n: {'app.kubernetes.io/name': 'b'} selects no pod": (
            (2, "spec", "ingress", 0, "from", 0, "podSelector", "matchLabels"),
            {LABEL: "b"},
        ),
        "pods of another namespace": (
            (2, "spec", "egress", 0, "to", 0, "podSelector", "matchLabels"),
            {LABEL: "a", "k": "dns"},
        ),
    }
    for words, (path, value) in breaks.items():
        broken = copy.deepcopy(good)
        at = broken
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        found = list(faults("p5", broken))
        assert any(words in fault for fault in found), (words, found)
    print(f"deploy_manifests: {len(breaks)} rules find their fault")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return
    import yaml

    folder, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        manifests = [manifest for manifest in yaml.safe_load_all(file) if manifest]
    found = list(faults(folder, manifests))
    for fault in found:
        print(f"{folder}: {fault}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"{folder}: {len(manifests)} manifests")


main()
