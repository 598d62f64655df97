"""The problems of a spec that are found without a host, for a check on a laptop or in CI."""

from __future__ import annotations

from runner.base.errors import Problem
from runner.plan.cloud_init import check_user_data, read_keys
from runner.plan.memory import refuse_contradictions, refuse_parts_of_pages
from runner.plan.problems import Problems
from runner.plan.shares import refuse_our_files_inside
from runner.spec.instance import CloudInitSpec, InstanceSpec


def document_problems(spec: InstanceSpec) -> list[Problem]:
    """Return the problems of the parsed *spec* on any host. The files that it names are not examined."""
    problems, memory = Problems(), spec.memory
    refuse_contradictions(spec, problems, controller=spec.cpu.placement == "controller")
    if memory.page_size is not None and memory.size != "limits":
        refuse_parts_of_pages(memory.page_size, memory.size, problems)
    for share in spec.share:
        refuse_our_files_inside(share, spec, problems)
    if spec.cloud_init is not None:
        _refuse_texts(spec.cloud_init, problems)
    return problems.found


def _refuse_texts(cloud_init: CloudInitSpec, problems: Problems) -> None:
    if isinstance(cloud_init.user_data, str):
        check_user_data(cloud_init.user_data.encode(), problems)
    for index, key in enumerate(cloud_init.ssh_keys):
        if isinstance(key, str):
            read_keys(f"ssh_keys[{index}]", key, key.encode(), problems)
