"""Every event that these programs log: its name, the words of its message, and its fields.

An event is the message of a log record, ``log.info(InstanceEvent.QEMU_STARTED, pid, version)``. Its name, in small letters, is
what programs read with ``--log-format json``: it belongs to the interface, is never changed, and is not given to another event.
The words may change.
"""

from __future__ import annotations

import re

MORE = re.compile(r"(?<=[a-z])%s")
"""A conversion after a word of a message, replaced by the rate limit's count of omitted messages."""


class Event:
    """The template of a message: *words*, then the *fields*, ``pid=%d version=%s``, which JSON has apart.

    *words* may have one :data:`MORE`. *meaning* says in Markdown what the message is where its words do not. It is no ``enum.Enum``:
    creating one of these tables as an enumeration takes twenty times as long.
    """

    __slots__ = ("fields", "key", "meaning", "words")

    def __init__(self, words: str, fields: str = "", meaning: str = "") -> None:
        self.words = words
        self.fields = fields
        self.meaning = meaning

    def __set_name__(self, table: type, name: str) -> None:
        self.key = name.lower()
        """The name for programs."""

    def place_of_more(self) -> int:
        """Return the index, among the arguments, of the rate limit's count of omitted messages."""
        return len(re.findall(r"%[.0-9]*[a-z]", MORE.split(self.words)[0]))

    def __str__(self) -> str:
        return f"{self.words} {self.fields}" if self.fields else self.words


def events_of(table: type) -> list[Event]:
    """Return the events of one of the tables below, in its order."""
    return [event for event in vars(table).values() if isinstance(event, Event)]


class InstanceEvent:
    """The events of an instance."""

    # -- the start, in its order
    INSTANCE_STARTING = Event("starting", "instance=%s version=%s")
    POD_NAMED = Event("in the pod", "name=%s namespace=%s node=%s uid=%s")
    DESCRIPTOR_INHERITED = Event("inherited descriptor", "name=%s kind=%s")
    DESCRIPTORS_IGNORED = Event("LISTEN_FDS is for process %s, and we are %d")
    PROBES_SERVED = Event("probes and metrics are served", "port=%d")
    PROBES_UNREACHABLE = Event("the guest has the address of %s: connections to it reach the guest, and not --http")
    REPORT_MISSED = Event("no report: %s")
    REPORT_REFUSED = Event("the controller takes no report%s: %s")
    CONTROLLER_AWAITED = Event("waiting for the controller: %s")
    OTHER_INSTANCE_AWAITED = Event("waiting for up to %.0f s: %s")
    FLOAT_ENTERED = Event("in float", "cgroup=%s cpus=%s")
    MEMORY_PREALLOCATED = Event("the guest's memory is there", "size=%s seconds=%.1f")
    NETWORK_RECOVERED = Event("network: found %r of a runner that was killed; removing it")
    NETWORK_UNRECOVERABLE = Event(
        "network: %r has too many routes for its alias; it cannot be restored if this runner is killed"
    )
    PACKETS_UNFILTERED = Event("network: this network namespace takes packets of the guest that may harm it: %s")
    FIRMWARE_VARIABLES_MADE = Event("made the firmware's variable store %s")
    VSOCK_ASSIGNED = Event("the guest's vsock context identifier is %d")
    CHILD_STARTING = Event("start", "role=%s argv=%s")
    QEMU_STARTED = Event("QEMU is up", "pid=%d version=%s")
    THREADS_PLACED = Event("placement: %s", meaning="`placement`, with `threads=…`: the table as a list of objects")
    QEMU_UPDATED = Event("QEMU is updated", "pid=%d version=%s from=%s pause=%.0fms")
    QEMU_NOT_UPDATED = Event("QEMU is not updated: %s")
    NEXT_QEMU_LOST = Event("the next QEMU is lost with the guest: %s")
    QEMU_LOST = Event("the guest cannot continue after a failed update of QEMU: %s")
    RECEIPT_OUTDATED_BY_QEMU_UPDATE = Event("the receipt is from before the update of QEMU: %s")
    GUARANTEE_ENFORCED = Event("guarantee enforced", "cpus=%s")
    GUARANTEE_ARRANGED = Event("guarantee arranged (%s)")
    GUARANTEE_CHANGED = Event("guarantee %s")
    CPUS_TUNED = Event("CPUs tuned %s")
    CPUS_NOT_TUNED = Event("the CPUs are not tuned: %s")
    CPUS_PARTLY_TUNED = Event("the CPUs are not tuned as asked: %s")
    GUEST_STARTED = Event("the guest runs")
    # -- the guest
    GUEST_READY = Event("the guest is ready%s", "sign=%s")
    GUEST_SILENT = Event("the guest is silent: %s")
    GUEST_NO_LONGER_SILENT = Event("the guest shows a sign of life")
    GUEST_CONSOLE_MUTE = Event("the guest does not use its console, or does not boot: %s")
    GUEST_CONSOLE_USED = Event("the guest has begun to use its console")
    GUEST_WITHOUT_ADDRESS = Event("the guest is not ready%s: %s")
    GUEST_HALTED = Event("the guest does not run%s: %s")
    GUEST_RUNS_AGAIN = Event("the guest runs again%s")
    QEMU_SILENT = Event("nothing is known of the guest%s: %s")
    QEMU_ANSWERS_AGAIN = Event("QEMU answers again%s")
    GUEST_RESETS_AGAIN_AND_AGAIN = Event("the guest is reset again and again%s: %d resets in the last minute")
    GUEST_CRASH_LOADED = Event("the guest's kernel has panicked and handles that itself, as kdump does%s")
    GUEST_SIGN_GIVEN_UP = Event("the guest cannot become ready%s: %s")
    READY_FILE_FAILED = Event("cannot show that the guest is ready%s: %s")
    GUEST_PANIC_ON_CONSOLE = Event(
        "the guest's kernel has panicked, by its console; it is not ready until it is reset%s", "line=%s"
    )
    GUEST_RESET = Event("the guest was reset%s", "reason=%s")
    GUEST_WATCHDOG_EXPIRED = Event("the guest's watchdog was not fed%s", "action=%s")
    GUEST_AGENT_CONNECTED = Event("the guest agent is there%s")
    GUEST_AGENT_DISCONNECTED = Event("the guest agent has gone%s")
    GUEST_AGENT_SILENT = Event("the guest agent does not answer: %s")
    HOST_MEMORY_FAILED = Event("the host's memory has failed%s", "recipient=%s action=%s")
    QEMU_EVENT_UNKNOWN = Event("QEMU reports what this program does not know%s", "event=%.80r")
    DISK_CORRUPTED = Event("the image of the disk %s is corrupted: %s%s")
    DISK_FAILED = Event("the disk %s has failed to %s: %s%s; the guest got the error")
    # -- children and threads
    CHILD_OUTPUT = Event("%s: %s")
    CHILD_OUTPUT_DROPPED = Event("%s: %d lines of its output were dropped")
    CHILD_OUTPUT_FAILED = Event("cannot read the output of %s: %s")
    CHILD_OUTPUT_DELAYED = Event("cannot wait for the output of %s: %s")
    CHILD_RESTARTING = Event("%s %s; starting it again", "pause=%.1fs")
    CHILD_LOST = Event("%s %s; the guest cannot live without it")
    PROCESS_MOVED_TO_FLOAT = Event("moved to float, because it was started in the pod's cgroup%s", "pid=%d name=%s")
    THREAD_MOVED_TO_FLOAT = Event("moved to float, because a vCPU had started it%s", "tid=%d name=%s")
    STRAY_NOT_MOVED = Event("%s is on the vCPUs' CPUs%s: %s")
    SWEEP_FAILED = Event("nothing could be looked for: %s")
    RUNNER_MISPLACED = Event("this process is on the vCPUs' CPUs: %s")
    KERNEL_THREADS_NOT_MOVED = Event("kernel threads of QEMU may run on the vCPUs' CPUs: %s")
    RECEIPT_OUTDATED = Event("the receipt is from before the last change or restart%s: %s")
    # -- CPUs that the kubelet takes or exchanges
    CPUS_LOST = Event("CPUs of vCPUs are lost%s: %s")
    CPUS_OFFLINE = Event("CPUs of vCPUs went offline: the vCPUs share the instance's other CPUs", "cpus=%s")
    CPUS_ONLINE = Event("CPUs of vCPUs are online again", "cpus=%s")
    VCPUS_NOT_PLACED_ANEW = Event("the vCPUs cannot be placed anew yet%s: %s")
    VCPUS_PLACED_ANEW = Event("vCPUs placed anew%s", "count=%d cpus=%s")
    GUEST_WITHOUT_CPUS = Event("the guest cannot continue: %s")
    GUEST_NOT_CONTINUED = Event("the guest does not continue: %s")
    FLOAT_WITHOUT_CPUS = Event("all CPUs of the container belong to vCPUs now, and all other threads share them")
    # -- operators
    CONSOLE_LOG_GIVEN_UP = Event("the console's log file lacks output from here on%s: %s")
    CONSOLE_LOG_GOES_ON = Event("the console's log file continues%s", "missing=%d")
    CONSOLE_CLIENT_REFUSED = Event("a console client is refused: it is not root in the instance's own PID namespace%s")
    CONSOLE_CLIENT_DETACHED = Event("a console client is detached, because the guest reads nothing%s: %s")
    VNC_VIEWER_REFUSED = Event("a VNC viewer was turned away%s: %s")
    VNC_VIEWER_NOT_ROOT = Event("a VNC viewer is refused: it is not root in the instance's own PID namespace%s")
    CONTROL_SOCKET_DELAYED = Event("a socket for ctl cannot be served yet: %s")
    CHANGE_WAITING = Event("a change waits", "kind=%s before=%r")
    CHANGE_FAILED = Event("a change that no client waits for any longer has failed: %s")
    VCPUS_PLUGGED = Event("vCPUs plugged", "count=%d from=%d cpus=%s pause=%.0fms")
    VCPUS_UNPLUGGED = Event("vCPUs unplugged", "count=%d from=%d")
    VCPUS_RELEASED = Event("vCPUs released by the guest", "count=%d from=%d")
    DISK_REMARKED = Event("the disk %s: %s")
    DISK_ATTACHED = Event("disk attached name=%s %s")
    DISK_DETACHED = Event("disk detached", "name=%s")
    DISK_GROWN = Event("disk grown", "name=%s from=%s to=%s")
    QMP_EXECUTED = Event("qmp executes", "command=%r pid=%d user=%d")
    QMP_REFUSED = Event("qmp refused", "command=%.80r pid=%d user=%d")
    QMP_EVENT = Event("qmp event", "name=%s data=%s")
    QMP_MESSAGE_UNEXPECTED = Event("qmp message that no task waits for", "message=%r")
    # -- renewals
    RUNNER_RENEWED = Event("the runner is renewed", "generation=%d program=%s pause=%.3fs")
    RUNNER_NOT_RENEWED = Event("the runner is not renewed, and the previous program continues: %s")
    RUNNER_RESUMED = Event("the runner continues after a fault of its own generation=%d pause=%.3fs: %s")
    RUNNER_FAULTS_TOO_MANY = Event("the runner has survived %d faults of its own in %g s, and not this one")
    RUNNER_NOT_RESUMED = Event("the runner cannot continue after a fault of its own: %s")
    EVENT_LOOP_ENDED = Event("the event loop has ended:")
    EVENT_LOOP_NOT_REPLACED = Event("what is held cannot be taken over by another event loop: %s")
    GUEST_POWERED_DOWN_PLAINLY = Event("the guest is powered down without an event loop")
    RECEIPT_NOT_RENEWED = Event("the receipt is from before the renewal: %s")
    GUEST_NOT_RUNNING = Event("the guest does not run after the renewal", "status=%s")
    # -- the end
    STOP_REQUESTED = Event("asked to stop", "reason=%s")
    STOP_REQUESTED_AGAIN = Event("asked to stop again%s", "reason=%s")
    GUEST_AGENT_ASKED = Event("the guest agent is asked to shut the guest down")
    GUEST_AGENT_NOT_ASKED = Event("the guest agent is not asked: %s; pressing the power button")
    GUEST_AGENT_REFUSED = Event("the guest agent refuses to shut the guest down: %s")
    GUEST_AGENT_TIMED_OUT = Event("the guest agent does nothing; pressing the power button")
    QEMU_TERMINATED = Event("QEMU does not quit; it gets a SIGTERM")
    QEMU_QUIT_UNANSWERED = Event("quit was not answered: %s")
    NETWORK_REMOVING = Event("network: removing", "bridges=%s")
    NETWORK_NOT_RESTORED = Event("network: %r has not got back", "lost=%r")
    CPUS_NOT_UNSEALED = Event("not unsealed: %s")
    CONTAINER_FROZEN = Event("the container's cgroup is frozen: what is in float ends there", "cgroup=%s")
    CONTROLLER_SILENT = Event("the controller does not answer; it will remove the instance's cgroup later")
    CONTROLLER_GONE = Event("%s; it will remove the instance's cgroup when it is back")
    RELEASE_FAILED = Event("fault: %s")
    SYSTEM_CALL_FAILED = Event("a system call has failed")
    TERMINATION_LOG_FAILED = Event("cannot open the termination log: %s")
    TERMINATION_LOG_UNWRITTEN = Event("cannot write the termination log: %s")
    INSTANCE_ENDED = Event("ended", "outcome=%s status=%d faults=%d")
    BUG = Event("this is a bug of instance-runner:")
    END_EXPLAINED = Event("%s", meaning="why the instance ended")
    PLAN_REMARKED = Event("%s", meaning="a remark of the plan, which is no refusal")
    CHILD_NOT_RESTARTED = Event("%s", meaning="why a child could not be started again")
    POWER_DOWN_NOT_ASKED = Event("%s", meaning="why the guest could not be asked to power down")
    DISK_UNDO_FAILED = Event("%s", meaning="the part of a failed attachment of a disk that could not be undone")


class ControllerEvent:
    """The events of the controller."""

    CONTROLLER_BUG = Event("this is a bug of instance-cgroup-controller:")
    CONTROLLER_READY = Event("ready", "socket=%s root=%s frozen=%r version=%s")
    CONTROLLER_STOPPING = Event("stopping", "signal=%s")
    INSECURE_PEERS = Event("INSECURE: any process that reaches the socket may register and remove any instance")
    INSECURE_DEVICES = Event(
        "INSECURE: a process in float may make and open device nodes as far as its capabilities allow"
    )
    DEVICE_FILTER_ATTACHED = Event("device filter attached", "cgroup=%s more=%s")
    MACVTAP_NOT_LOADED = Event(
        "macvtaps are not allowed, because the kernel has not loaded their driver; load macvtap and restart the controller"
    )
    REGISTRATION_IMPOSSIBLE = Event("no instance can be registered", "reason=%r")
    KUBELET_STATE_READ = Event("kubelet's state read", "policy=%s shared_pool=%s pods=%d")
    KUBELET_MEMORY_STATE_STRANGE = Event("kubelet's memory state names nodes without memory", "nodes=%s")
    RESERVED_CPUS_READ = Event("reserved CPUs read", "cpus=%s")
    DECISIONS_FROZEN = Event("decisions frozen, running instances are left as they are", "reason=%r")
    GROUP_FAILED = Event("pass failed%s", "group=%r reason=%r")
    PASS_FAILED = Event("pass failed%s", "reason=%r")
    CHANGES_SEEN_LATE = Event("changes will be seen late%s", "reason=%r")
    CGROUP_FILES_LEASED = Event("cgroup files are leased by other processes%s", "files=%d one=%s")
    CGROUP_FILES_NOT_HELD = Event("cgroup files can be leased by other processes%s", "reason=%r")
    LIMIT_MISSING = Event("limit missing%s", "group=%r reason=%r")
    LIMIT_WRITTEN = Event("limit written", "file=%s value=%s")
    MOUNT_OPTIONS_ADDED = Event("mount options removed by others, added again%s", "mount=%s options=%s")
    CPUSET_CHANGED_BY_OTHERS = Event("cpuset changed by others%s", "group=%s found=%s")
    CPUSET_WRITTEN = Event("cpuset written%s", "group=%s cpus=%s")
    ACTION_DONE = Event("action %r")
    INSTANCE_REGISTERED = Event("instance %s%s", "uuid=%s cpus=%s")
    INSTANCE_WAITS_FOR_ANOTHER = Event("instance waits for the end of another%s", "uuid=%s cpus=%s holder=%s")
    INSTANCE_WITHOUT_SECCOMP = Event("instance without seccomp%s", "uuid=%s why=%r")
    INSTANCE_SEAL_CHANGED = Event("instance %s%s", "uuid=%s found=%r")
    INSTANCE_NOT_SEALED = Event("instance not sealed%s", "uuid=%s reason=%r")
    INSTANCE_TUNED = Event("instance tuned%s", "uuid=%s tuning=%s")
    INSTANCE_DISTURBED = Event("an instance's CPUs are disturbed", "reason=%r")
    SETTING_WRITTEN = Event("setting written", "path=%s value=%s before=%s")
    SETTINGS_RECORDS_LOST = Event("records of the machine's settings lost", "path=%s reason=%r")
    SETTINGS_RECORDS_STALE = Event("records of the machine's settings are not up to date", "path=%s reason=%r")
    TASK_BEGUN_AGAIN = Event("task failed and is begun again", "task=%s reason=%r")
    INSTANCE_DEREGISTERED = Event("instance deregistered%s", "uuid=%s")
    EMPTY_INSTANCE_REMOVED = Event("empty instance gives way%s", "uuid=%s to=%s")
    STALE_INSTANCE_REMOVED = Event("stale instance removed", "uuid=%s")
    PODLESS_INSTANCE_EMPTIED = Event("instance without a pod", "uuid=%s rest=%s processes=%d one=%s")
    POD_CROWDED = Event("pod with too many processes in float ended%s", "uuid=%s processes=%d")
    OUT_OF_MEMORY = Event("out of memory in float%s", "uuid=%s processes=%d most=%s")
    KERNEL_THREAD_MOVED = Event("kernel thread moved to float%s", "pid=%d")
    KERNEL_THREAD_NOT_MOVED = Event("kernel thread stays on the instance's CPUs%s", "pid=%d reason=%r")
    REQUEST_REFUSED = Event("request refused%s", "method=%s reason=%s why=%r")
    CONTROLLER_FAILED = Event("%s", meaning="why the controller ends")


class SharedEvent:
    """The events of both programs."""

    MESSAGES_LEFT_OUT = Event("left out of this log", "kind=%s peer=%s count=%d")
    KERNEL_SHORT = Event("the kernel is short of something, trying again", "times=%d reason=%r")
    CONNECTION_LOST = Event("connection lost", "reason=%r")
    CONNECTION_ENDED = Event("connection ended%s", "reason=%r")
    CONNECTION_BUG = Event("connection ended by a fault of this program%s")
    METHOD_BUG = Event("method failed%s", "method=%r")
    CONNECTION_ABORTED = Event("a client has gone", "reason=%r")
    DESCRIPTORS_UNSENT = Event("request done, but its descriptors could not be sent%s", "reason=%r")
    HTTP_RESPONSE_BUG = Event("this is a bug: the response to %r could not be made")
    OUTPUT_DROPPED = Event("output was dropped: the reader was too slow", "bytes=%d")


OTHER = "other"
"""The name for what a library logs."""
