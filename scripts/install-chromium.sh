#!/usr/bin/env bash
# Brings the browser that looks at the page of locks in its tests onto a Debian
# machine: Chromium, from the distribution. Run it as root. Whoever runs it
# again, or without root, only learns what is there.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

say() { echo "install-chromium: $*"; }
die() {
	say "$*" >&2
	exit 1
}

# Prints the version of what it finds and fails if it finds nothing. On Ubuntu
# the program can be one that only asks to install it from elsewhere.
browser() {
	local name
	for name in chromium chromium-browser google-chrome; do
		! "$name" --version 2>/dev/null || return 0
	done
	return 1
}

# Runs a command silently; shows what it said only if it fails.
quietly() { "$@" >"$work/output" 2>&1 || { cat "$work/output" >&2; return 1; }; }

main() {
	! browser || return 0
	if ! command -v apt-get >/dev/null; then
		say "no Chromium here; this is not Debian, so install it yourself and have chromium on PATH"
		return
	elif [ "$EUID" != 0 ]; then
		say "no Chromium here; run scripts/install-chromium.sh as root to install"
		return
	fi
	if grep -qs '^ID=ubuntu' /etc/os-release; then
		say "Ubuntu has no Chromium as a package of apt; install one yourself and have chromium on PATH, or the tests of the page skip"
		return
	fi
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	quietly apt-get update || die "apt-get update failed"
	say "installing chromium"
	quietly apt-get install -y --no-install-recommends --no-remove chromium || die "could not install chromium"
	browser || die "Chromium is installed but does not run"
}

main
