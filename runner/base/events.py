"""The name of each event that these programs log, for programs that read ``--log-format json``: the words of a message may change.

A name belongs to the interface: it is never changed, and not given to another event. Imported only for logs in JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

INSTANCE: Mapping[str, str] = {
    # -- the start, in its order
    "starting instance=%s": "instance_starting",
    "in the pod name=%s namespace=%s node=%s uid=%s": "pod_named",
    "inherited descriptor name=%s kind=%s": "descriptor_inherited",
    "LISTEN_FDS is for process %s, and we are %d": "descriptors_ignored",
    "probes and metrics are served port=%d": "probes_served",
    "the guest has the address of %s: connections to it reach the guest, and not --http": "probes_unreachable",
    "waiting for the controller: %s": "controller_awaited",
    "waiting for up to %.0f s: %s": "other_instance_awaited",
    "in float cgroup=%s cpus=%s": "float_entered",
    "the guest's memory is there size=%s seconds=%.1f": "memory_preallocated",
    "network: found %r of a runner that was killed; removing it": "network_recovered",
    "network: %r has too many routes for its alias; it cannot be restored if this runner is killed": "network_unrecoverable",
    "made the firmware's variable store %s": "firmware_variables_made",
    "the guest's vsock context identifier is %d": "vsock_assigned",
    "start role=%s argv=%s": "child_starting",
    "QEMU is up pid=%d version=%s": "qemu_started",
    "placement: %s": "threads_placed",
    "QEMU is updated pid=%d version=%s from=%s pause=%.0fms": "qemu_updated",
    "QEMU is not updated: %s": "qemu_not_updated",
    "the next QEMU is lost with the guest: %s": "next_qemu_lost",
    "the guest cannot run on after QEMU was not updated: %s": "qemu_lost",
    "the receipt is that of before QEMU was updated: %s": "receipt_outdated_by_qemu_update",
    "guarantee enforced cpus=%s": "guarantee_enforced",
    "guarantee arranged (%s)": "guarantee_arranged",
    "guarantee %s": "guarantee_changed",
    "CPUs tuned %s": "cpus_tuned",
    "the CPUs are not tuned: %s": "cpus_not_tuned",
    "the CPUs are not tuned as asked: %s": "cpus_partly_tuned",
    "the guest runs": "guest_started",
    # -- the guest
    "the guest is ready%s sign=%s": "guest_ready",
    "the guest is silent: %s": "guest_silent",
    "the guest shows a sign of life": "guest_no_longer_silent",
    "the guest does not use its console, or does not boot: %s": "guest_console_mute",
    "the guest has begun to use its console": "guest_console_used",
    "the guest does not run%s: %s": "guest_halted",
    "the guest runs again%s": "guest_runs_again",
    "nothing is known of the guest%s: %s": "qemu_silent",
    "QEMU answers again%s": "qemu_answers_again",
    "the guest does not get up%s: %d resets in the last minute": "guest_resets_again_and_again",
    "the guest's kernel has panicked and handles that itself, as kdump does%s": "guest_crash_loaded",
    "the guest cannot become ready%s: %s": "guest_sign_given_up",
    "cannot show that the guest is ready%s: %s": "ready_file_failed",
    "the guest's kernel has panicked, by its console; it is not ready until it is reset%s line=%s": "guest_panic_on_console",
    "the guest was reset%s reason=%s": "guest_reset",
    "the guest's watchdog was not fed%s action=%s": "guest_watchdog_expired",
    "the guest agent is there%s": "guest_agent_connected",
    "the guest agent has gone%s": "guest_agent_disconnected",
    "the guest agent does not answer: %s": "guest_agent_silent",
    "the host's memory has failed%s recipient=%s action=%s": "host_memory_failed",
    "QEMU reports what this program does not know%s event=%.80r": "qemu_event_unknown",
    "the image of the disk %s is corrupted: %s%s": "disk_corrupted",
    "the disk %s has failed to %s: %s%s; the guest got the error": "disk_failed",
    # -- children and threads
    "%s: %s": "child_output",
    "%s: %d lines of its output were dropped": "child_output_dropped",
    "cannot read the output of %s: %s": "child_output_failed",
    "cannot wait for the output of %s: %s": "child_output_delayed",
    "%s %s; starting it again pause=%.1fs": "child_restarting",
    "%s %s; the guest cannot live without it": "child_lost",
    "moved to float, as it was started in the pod's cgroup%s pid=%d name=%s": "process_moved_to_float",
    "moved to float, as a vCPU had started it%s tid=%d name=%s": "thread_moved_to_float",
    "%s is on the vCPUs' CPUs%s: %s": "stray_not_moved",
    "nothing could be looked for: %s": "sweep_failed",
    "this process is on the vCPUs' CPUs: %s": "runner_misplaced",
    "kernel threads of QEMU may run on the vCPUs' CPUs: %s": "kernel_threads_not_moved",
    "the receipt is that of before a restart%s: %s": "receipt_outdated",
    # -- CPUs that the kubelet takes or exchanges
    "CPUs of vCPUs are lost%s: %s": "cpus_lost",
    "CPUs of vCPUs went offline: the vCPUs share the instance's other CPUs cpus=%s": "cpus_offline",
    "CPUs of vCPUs are online again cpus=%s": "cpus_online",
    "the vCPUs cannot be placed anew yet%s: %s": "vcpus_not_placed_anew",
    "vCPUs placed anew%s count=%d cpus=%s": "vcpus_placed_anew",
    "the guest cannot run on: %s": "guest_without_cpus",
    "the guest does not run on: %s": "guest_not_continued",
    "all CPUs of the container belong to vCPUs now, and all other threads share them": "float_without_cpus",
    # -- operators
    "the console's log file lacks output from here on%s: %s": "console_log_given_up",
    "the console's log file goes on%s missing=%d": "console_log_goes_on",
    "a console client is refused: it is not root in the instance's own PID namespace%s": "console_client_refused",
    "a console client is detached, as the guest reads nothing%s: %s": "console_client_detached",
    "a VNC viewer was turned away%s: %s": "vnc_viewer_refused",
    "a VNC viewer is refused: it is not root in the instance's own PID namespace%s": "vnc_viewer_not_root",
    "a socket for ctl cannot be served yet: %s": "control_socket_delayed",
    "vCPUs plugged count=%d from=%d cpus=%s pause=%.0fms": "vcpus_plugged",
    "vCPUs unplugged count=%d from=%d": "vcpus_unplugged",
    "vCPUs released by the guest count=%d from=%d": "vcpus_released",
    "the disk %s: %s": "disk_remarked",
    "disk attached name=%s %s": "disk_attached",
    "disk detached name=%s": "disk_detached",
    "disk grown name=%s from=%s to=%s": "disk_grown",
    "qmp executes command=%r pid=%d user=%d": "qmp_executed",
    "qmp refused command=%.80r pid=%d user=%d": "qmp_refused",
    "qmp connection lost reason=%r": "qmp_connection_lost",
    "qmp connection ended by a fault of this program": "qmp_connection_bug",
    "qmp event name=%s data=%s": "qmp_event",
    "qmp message that no task waits for message=%r": "qmp_message_unexpected",
    # -- renewals
    "the runner is renewed generation=%d program=%s pause=%.3fs": "runner_renewed",
    "the runner is not renewed, and the program before goes on: %s": "runner_not_renewed",
    "the runner goes on after a fault of its own generation=%d pause=%.3fs: %s": "runner_resumed",
    "the runner has survived %d faults of its own in %g s, and not this one": "runner_faults_too_many",
    "the runner cannot continue after a fault of its own: %s": "runner_not_resumed",
    "the event loop has ended:": "event_loop_ended",
    "what is held cannot be taken over by another event loop: %s": "event_loop_not_replaced",
    "the guest is powered down without an event loop": "guest_powered_down_plainly",
    "the receipt is that of before the renewal: %s": "receipt_not_renewed",
    "the guest does not run after the renewal status=%s": "guest_not_running",
    # -- the end
    "asked to stop reason=%s": "stop_requested",
    "asked to stop again%s reason=%s": "stop_requested_again",
    "the guest agent is asked to shut the guest down": "guest_agent_asked",
    "the guest agent is not asked: %s; pressing the power button": "guest_agent_not_asked",
    "the guest agent refuses to shut the guest down: %s": "guest_agent_refused",
    "the guest agent does nothing; pressing the power button": "guest_agent_timed_out",
    "QEMU does not quit; it gets a SIGTERM": "qemu_terminated",
    "quit was not answered: %s": "qemu_quit_unanswered",
    "network: removing bridges=%s": "network_removing",
    "network: %r has not got back lost=%r": "network_not_restored",
    "not unsealed: %s": "cpus_not_unsealed",
    "the container's cgroup is frozen: what is in float ends there cgroup=%s": "container_frozen",
    "the controller does not answer; it will remove the instance's cgroup later": "controller_silent",
    "%s; it will remove the instance's cgroup when it is back": "controller_gone",
    "fault: %s": "release_failed",
    "a system call has failed": "system_call_failed",
    "cannot open the termination log: %s": "termination_log_failed",
    "cannot write the termination log: %s": "termination_log_unwritten",
    "ended outcome=%s status=%d faults=%d": "instance_ended",
    "this is a bug of instance-runner:": "bug",
}
"""Template of an instance's message → name of the event."""

CONTROLLER: Mapping[str, str] = {
    "this is a bug of instance-cgroup-controller:": "controller_bug",
    "ready socket=%s root=%s frozen=%r": "controller_ready",
    "stopping signal=%s": "controller_stopping",
    "INSECURE: any process that reaches the socket may register and remove any instance": "insecure_peers",
    "INSECURE: a process in float may make and open device nodes as far as its capabilities allow": "insecure_devices",
    "device filter attached cgroup=%s more=%s": "device_filter_attached",
    "macvtaps are not allowed, the kernel has not loaded the driver; load macvtap and restart the controller": (
        "macvtap_not_loaded"
    ),
    "no instance can be registered reason=%r": "registration_impossible",
    "kubelet's state read policy=%s shared_pool=%s pods=%d": "kubelet_state_read",
    "kubelet's memory state names nodes without memory nodes=%s": "kubelet_memory_state_strange",
    "reserved CPUs read cpus=%s": "reserved_cpus_read",
    "decisions frozen, running instances are left as they are reason=%r": "decisions_frozen",
    "pass failed%s group=%r reason=%r": "group_failed",
    "pass failed%s reason=%r": "pass_failed",
    "changes will be seen late%s reason=%r": "changes_seen_late",
    "cgroup files are leased by other processes%s files=%d one=%s": "cgroup_files_leased",
    "cgroup files can be leased by other processes%s reason=%r": "cgroup_files_not_held",
    "limit missing group=%r reason=%r": "limit_missing",
    "limit written file=%s value=%s": "limit_written",
    "cpuset changed by others group=%s found=%s": "cpuset_changed_by_others",
    "cpuset written%s group=%s cpus=%s": "cpuset_written",
    "action %r": "action_done",
    "instance %s%s uuid=%s cpus=%s": "instance_registered",
    "instance waits for the end of another%s uuid=%s cpus=%s holder=%s": "instance_waits_for_another",
    "instance without seccomp%s uuid=%s why=%r": "instance_without_seccomp",
    "instance %s%s uuid=%s found=%r": "instance_seal_changed",
    "instance not sealed%s uuid=%s reason=%r": "instance_not_sealed",
    "instance tuned%s uuid=%s tuning=%s": "instance_tuned",
    "an instance's CPUs are disturbed reason=%r": "instance_disturbed",
    "setting written path=/%s value=%s before=%s": "setting_written",
    "records of the machine's settings lost path=%s reason=%r": "settings_records_lost",
    "records of the machine's settings are not up to date path=%s reason=%r": "settings_records_stale",
    "records of the machine's settings not taken over path=%s reason=%r": "settings_records_not_moved",
    "task failed and is begun again task=%s reason=%r": "task_begun_again",
    "instance deregistered%s uuid=%s": "instance_deregistered",
    "empty instance gives way%s uuid=%s to=%s": "empty_instance_removed",
    "stale instance removed uuid=%s": "stale_instance_removed",
    "instance without a pod uuid=%s rest=%s processes=%d one=%s": "podless_instance_emptied",
    "out of memory in float%s uuid=%s processes=%d most=%s": "out_of_memory",
    "kernel thread moved to float%s pid=%d": "kernel_thread_moved",
    "kernel thread stays on the instance's CPUs%s pid=%d reason=%r": "kernel_thread_not_moved",
    "request refused%s method=%s reason=%s why=%r": "request_refused",
}
"""The same for the controller."""

BOTH: Mapping[str, str] = {
    "left out of this log kind=%s peer=%s count=%d": "messages_left_out",
    "the kernel is short of something, trying again times=%d reason=%r": "kernel_short",
    "connection lost reason=%r": "connection_lost",
    "connection ended%s reason=%r": "connection_ended",
    "connection ended by a fault of this program%s": "connection_bug",
    "method failed%s method=%r": "method_bug",
    "a client has gone reason=%r": "connection_aborted",
    "request done, but its descriptors could not be sent%s reason=%r": "descriptors_unsent",
    "HTTP connection ended by a fault of this program": "http_connection_bug",
    "this is a bug: the response to %r could not be made": "http_response_bug",
}
"""The same for what both programs log."""

WHOLE_SENTENCES: Mapping[str, tuple[str, str]] = {
    "runner": ("end_explained", "why the instance ended"),
    "runner.instance.init": ("plan_remarked", "what the plan has not refused, but remarks"),
    "runner.instance.parts.daemons": ("child_not_restarted", "why a child could not be started again"),
    "runner.instance.parts.qemu": ("power_down_not_asked", "why the guest could not be asked to power down"),
    "runner.instance.change.hotplug": ("disk_undo_failed", "what of a disk that was not attached could not be undone"),
    "runner.controller.main": ("controller_failed", "why the controller ends"),
}
"""Logger → name of the event whose message is a whole sentence (``%s``), and what the sentence says."""

OUTPUT_DROPPED = "output_dropped"
OTHER = "other"
"""The name for what a library logs."""

_NAMES = {**INSTANCE, **CONTROLLER, **BOTH}


def event_name(record: logging.LogRecord) -> str:
    """Return the name of the event that *record* reports."""
    if record.msg == "%s" and record.name in WHOLE_SENTENCES:
        return WHOLE_SENTENCES[record.name][0]
    return _NAMES.get(str(record.msg), OTHER)
