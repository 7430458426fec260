#!/usr/bin/env bash
# Brings what the benchmarks compare with onto a Debian or Ubuntu machine: Redis
# and etcd, from the distribution. It installs programs only; no service is set
# up or started. Run it as root. Whoever runs it again, or without root, only
# learns what is there.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

say() { echo "install-rivals: $*"; }
die() {
	say "$*" >&2
	exit 1
}

# Each prints the version of what it finds and fails if it finds nothing.
redis() { redis-server --version 2>/dev/null; }
etcd() { command etcd --version 2>/dev/null | awk 'NR == 1'; }

# Runs a command silently; shows what it said only if it fails.
quietly() { "$@" >"$work/output" 2>&1 || { cat "$work/output" >&2; return 1; }; }

# The packages of the servers would start services. But the program of Redis is
# in redis-tools, under another name: what it is called by decides what it does.
install_redis() {
	say "installing redis-tools"
	quietly apt-get install -y --no-install-recommends --no-remove redis-tools || die "could not install redis-tools"
	ln -sf "$(command -v redis-check-rdb)" /usr/local/bin/redis-server
}

# etcd is a single file.
install_etcd() {
	say "downloading etcd-server"
	(cd "$work" && quietly apt-get -oAPT::Sandbox::User=root download etcd-server) || die "could not download etcd-server"
	dpkg -x "$work"/etcd-server_*.deb "$work/etcd"
	install "$work/etcd/usr/bin/etcd" /usr/local/bin/etcd
}

main() {
	local missing=()
	redis || missing+=(redis)
	etcd || missing+=(etcd)
	[ ${#missing[@]} -gt 0 ] || return 0

	if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
		say "no ${missing[*]} here; this is not Debian or Ubuntu, so install them yourself"
		say "and have redis-server and etcd on PATH"
		return
	elif [ "$EUID" != 0 ]; then
		say "no ${missing[*]} here; run scripts/install-rivals.sh as root to install"
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

main
