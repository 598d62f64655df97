#!/bin/bash
# The instance without instance-runner: the same children with the same arguments, in the same order and on the same CPUs.
# usage: bare.sh DIRECTORY VCPU-CPU OTHER-CPUS
#
# DIRECTORY has what `instance-runner plan --show-argv` prints, in parts: networks.sh, daemons.sh (and the sockets they
# make in "sockets"), qemu.sh with the monitor on standard input and output and the console on descriptor 7.
directory=$1 cpu=$2 others=$3
mark() { echo "mark $1 $EPOCHREALTIME" >&2; }
mark interpreter

sleep infinity &
taskset -cp "$others" $$ >/dev/null
# shellcheck disable=SC1091
. "$directory/networks.sh"
mark network

# shellcheck disable=SC1091
. "$directory/daemons.sh"
exec {never}<> <(:)
while read -r socket; do
  until [ -S "$socket" ]; do read -rt 0.001 -u "$never"; done
done <"$directory/sockets"
mark daemons

exec 7>&1
# shellcheck disable=SC1091
coproc QEMU { . "$directory/qemu.sh"; }
answer=
ask() {
  echo "{\"execute\": \"$1\"}" >&"${QEMU[1]}"
  while read -r answer <&"${QEMU[0]}"; do case $answer in *'"return"'*) return ;; esac done
}
read -r answer <&"${QEMU[0]}"
ask qmp_capabilities
mark greeting

ask query-cpus-fast
[[ $answer =~ \"thread-id\":\ ([0-9]+) ]] && taskset -cp "$cpu" "${BASH_REMATCH[1]}" >/dev/null
ask cont
mark cont
wait
