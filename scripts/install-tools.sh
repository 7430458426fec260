#!/usr/bin/env bash
# Brings programs of the tests and benchmarks onto a Debian or Ubuntu machine, from the
# distribution: Redis and etcd, which bench compares with, and Prometheus, which evaluates
# the dashboard and the alerts, with its promtool, which tests the alerts. It installs programs only; no service is set up or started.
# Run it as root. Whoever runs it again, or without root, only learns what is there.
#
#   scripts/install-tools.sh redis etcd prometheus
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

say() { echo "install-tools: $*"; }
die() {
	say "$*" >&2
	exit 1
}

# Each prints the version of what it finds and fails if it finds nothing.
redis() { redis-server --version 2>/dev/null; }
etcd() { command etcd --version 2>/dev/null | awk 'NR == 1'; }
prometheus() {
	command promtool --version >/dev/null 2>&1 &&
		command prometheus --version 2>&1 | awk 'NR == 1 && /version/ { print; found = 1 } END { exit !found }'
}

# Runs a command silently; shows what it said only if it fails.
quietly() { "$@" >"$work/output" 2>&1 || { cat "$work/output" >&2; return 1; }; }

# The packages of the servers would start services. But the program of Redis is
# in redis-tools, under another name: what it is called by decides what it does.
install_redis() {
	say "installing redis-tools"
	quietly apt-get install -y --no-install-recommends --no-remove redis-tools || die "could not install redis-tools"
	ln -sf "$(command -v redis-check-rdb)" /usr/local/bin/redis-server
}

install_etcd() { unpack etcd-server etcd; }
install_prometheus() { unpack prometheus prometheus promtool; }

# Takes the programs that are needed out of a package.
unpack() {
	local package=$1 program
	shift
	say "downloading $package"
	(cd "$work" && quietly apt-get -oAPT::Sandbox::User=root download "$package") || die "could not download $package"
	dpkg -x "$work/$package"_*.deb "$work/$package"
	for program; do
		install "$work/$package/usr/bin/$program" "/usr/local/bin/$program"
	done
}

main() {
	local missing=() name
	for name; do
		"$name" || missing+=("$name")
	done
	[ ${#missing[@]} -gt 0 ] || return 0

	if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
		say "no ${missing[*]} here; this is not Debian or Ubuntu, so install them yourself"
		say "and have redis-server, etcd, prometheus and promtool on PATH"
		return
	elif [ "$EUID" != 0 ]; then
		say "no ${missing[*]} here; run scripts/install-tools.sh ${missing[*]} as root to install"
		return
	fi
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	quietly apt-get update || die "apt-get update failed"
	for name in "${missing[@]}"; do
		"install_$name"
		"$name" || die "$name is installed but does not run"
	done
}

main "$@"
