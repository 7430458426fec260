#!/usr/bin/env bash
# Runs a command in a clone of this checkout, in a bare root: a minimal Debian,
# made by debootstrap, that has nothing but Go. So what the README promises is
# tried where nobody has installed anything by hand.
#
#   scripts/bare.sh [command ...]    by default .ci/run
#
# RELEASE is the release, by default Debian's bookworm; trixie and sid of Debian
# and those of Ubuntu are known to debootstrap, too. Run it as root. It exits with
# 69, and has said why, where such a root cannot be had.
#
# The clone has what is committed. Of this machine the root sees Go's toolchain
# and caches, and how to reach the network: name servers, proxies, the
# certificates of the site, the settings of apt for its mirror. All mounts are in
# a mount namespace of their own, and all processes in one for them: both end with
# this script, however it ends. A copy of the bare root is kept for a week.
set -euo pipefail

RELEASE=${RELEASE:-bookworm}
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

say() { echo "bare: $*"; }
unavailable() {
	say "no bare root here: $*" >&2
	exit 69
}
# Runs a command silently; shows what it said only if it fails.
quietly() { "$@" >"$work/output" 2>&1 || { cat "$work/output" >&2; return 1; }; }

# The second half, in namespaces of its own: mounts what the root $1 needs, and
# runs the rest there.
inside() {
	local root=$1 node
	shift
	mount -t proc proc "$root/proc"
	mount -t sysfs -o ro sysfs "$root/sys"
	mount -t tmpfs -o mode=755 tmpfs "$root/dev"
	mkdir "$root/dev/shm" "$root/dev/pts"
	mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
	# The data of the servers of tests: on a disk that others use as well, a server may
	# stand still for seconds whenever it makes or drops a table.
	mount -t tmpfs -o mode=1777,size=75% tmpfs "$root/tmp"
	mount -t devpts -o newinstance,mode=620,ptmxmode=666 devpts "$root/dev/pts"
	ln -s pts/ptmx "$root/dev/ptmx"
	for node in null zero full random urandom tty; do
		: >"$root/dev/$node"
		mount --bind "/dev/$node" "$root/dev/$node"
	done
	ln -s /proc/self/fd "$root/dev/fd"
	for node in 0:stdin 1:stdout 2:stderr; do
		ln -s "/proc/self/fd/${node%%:*}" "$root/dev/${node#*:}"
	done
	for node in "$goroot" "$gomodcache" "$gocache"; do
		mkdir -p "$node" "$root$node"
		mount --bind "$node" "$root$node"
	done
	mount -o remount,bind,ro "$root$goroot"
	# shellcheck disable=SC2016 # the root's shell is to expand them
	exec chroot "$root" /usr/bin/env -i "${environment[@]}" /bin/bash -c 'cd ~/mysqllock && "$@"' bare "$@"
}

# Ends what runs in the root, and removes it.
clean() {
	[ -z "${runner:-}" ] || { kill -KILL "$runner" && wait "$runner"; } 2>/dev/null || true
	rm -rf "$work"
}

# Prints how the host's apt reaches the network, as apt's configuration.
apt_network() {
	apt-config dump | grep -E '^Acquire::(http|https)::|^Acquire::(Check-Valid-Until|Check-Date|Retries)' |
		grep -v Proxy-Auto-Detect || true
}

# Chooses where the release comes from, and the keys that sign it.
choose_mirror() {
	local debian=yes
	case $(readlink -f "/usr/share/debootstrap/scripts/$RELEASE") in
	*/gutsy) debian= ;; # what all of Ubuntu's are made by
	'') unavailable "debootstrap does not know the release $RELEASE" ;;
	esac
	if [ -n "$debian" ]; then
		distribution=debian components=main package=debian-archive-keyring
		keyrings=(/usr/share/keyrings/debian-archive-keyring.{pgp,gpg})
		mirror=http://deb.debian.org/debian
	else
		distribution=ubuntu components=main,universe package=ubuntu-keyring
		keyrings=(/usr/share/keyrings/ubuntu-archive-keyring.gpg)
		mirror=http://archive.ubuntu.com/ubuntu
	fi
	# The configured mirror may be the only one in reach.
	local own
	own=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null |
		grep -v '^[[:space:]]*#' | grep -oE "https?://[^] ]+/$distribution/?( |\$)" | awk 'NR == 1 { print $1 }') || true
	mirror=${own:-$mirror}
	for keyring in "${keyrings[@]}"; do
		[ ! -e "$keyring" ] || return 0
	done
	quietly apt-get install -y --no-install-recommends "$package" ||
		unavailable "no $package, whose keys sign $RELEASE"
	for keyring in "${keyrings[@]}"; do
		[ ! -e "$keyring" ] || return 0
	done
	unavailable "no ${keyrings[*]}"
}

# Unpacks the bare root into $work/root, and makes it first if there is none of
# the last week.
make_root() {
	local base=$cache/$RELEASE.tar
	mkdir "$work/root"
	if [ -z "$(find "$base" -mtime -7 2>/dev/null)" ]; then
		say "making a bare $RELEASE from $mirror"
		quietly debootstrap --variant=minbase --force-check-gpg --keyring="$keyring" --components="$components" \
			"$RELEASE" "$work/root" "$mirror" || unavailable "debootstrap failed"
		rm -rf "$work"/root/var/cache/apt/archives/*.deb
		tar -C "$work/root" -cf "$work/base.tar" .
		mv "$work/base.tar" "$base"
	else
		tar -C "$work/root" -xf "$base"
	fi
}

# Tells the root how to reach the network, as this machine does.
connect_root() {
	cp -L /etc/resolv.conf /etc/hosts "$work/root/etc/"
	hostname >"$work/root/etc/hostname"
	apt_network >"$work/root/etc/apt/apt.conf.d/90host"
	# Certificates of the site's own are taken up by the package ca-certificates.
	mkdir -p "$work/root/usr/local/share/ca-certificates"
	cp /usr/local/share/ca-certificates/*.crt "$work/root/usr/local/share/ca-certificates/" 2>/dev/null || true
}

clone() {
	# The checkout may belong to another user.
	printf '[safe]\n\tdirectory = *\n' >"$work/gitconfig"
	GIT_CONFIG_GLOBAL=$work/gitconfig git clone -q --no-hardlinks "$PWD" "$work/root/root/mysqllock"
	[ -z "$(GIT_CONFIG_GLOBAL=$work/gitconfig git status --porcelain)" ] ||
		say "WARNING: the bare root has what is committed; your other changes are not in it"
}

main() {
	[ $# -gt 0 ] || set -- .ci/run
	[ "$(uname)" = Linux ] || unavailable "this is not Linux"
	[ "$EUID" = 0 ] || unavailable "that takes root"
	command -v apt-get >/dev/null || unavailable "this is not Debian or Ubuntu"
	command -v go >/dev/null || unavailable "there is no Go"
	# shellcheck disable=SC2016
	unshare --mount --pid --fork --kill-child sh -c 'mount -t tmpfs tmpfs /mnt && mount -t proc proc /mnt' 2>/dev/null ||
		unavailable "mounting is not permitted"

	cache=${XDG_CACHE_HOME:-$HOME/.cache}/mysqllock/bare
	mkdir -p "$cache"
	exec 8>"$cache/lock" # one at a time makes, or removes what one that was killed has left
	flock 8
	local left
	for left in "$cache"/run.*; do
		[ -d "$left" ] && flock -n "$left" rm -rf "$left" || true
	done
	work=$(mktemp -d "$cache/run.XXXXXXXXXX")
	exec 9<"$work"
	flock 9
	trap clean EXIT
	trap 'exit 130' INT TERM HUP

	if ! command -v debootstrap >/dev/null || ! command -v git >/dev/null; then
		quietly apt-get update && quietly apt-get install -y --no-install-recommends debootstrap git ||
			unavailable "debootstrap and git are not to be had"
	fi
	local distribution components package keyrings keyring mirror
	choose_mirror
	make_root
	exec 8>&- # the next may begin
	connect_root
	clone

	goroot=$(go env GOROOT) gomodcache=$(go env GOMODCACHE) gocache=$(go env GOCACHE)
	environment=(
		HOME=/root "TERM=${TERM:-dumb}" LANG=C.UTF-8 "CI=${CI:-}" MYSQLLOCK_BARE="$RELEASE"
		"PATH=$goroot/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
		"GOMODCACHE=$gomodcache" "GOCACHE=$gocache"
	)
	local name
	for name in GOPROXY GOFLAGS GOTOOLCHAIN GOSUMDB GONOSUMDB GONOPROXY GOPRIVATE GOINSECURE; do
		environment+=("$name=$(go env $name)")
	done
	for name in {http,https,no,all}_proxy {HTTP,HTTPS,NO,ALL}_PROXY; do
		[ -z "${!name:-}" ] || environment+=("$name=${!name}")
	done

	say "a bare $RELEASE is there ($SECONDS s); running $* in it"
	export -f inside
	# What this script starts ends with it, also when it is killed: unshare by the
	# signal, and with it everything in its namespaces.
	local status=0
	setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child=KILL \
		bash -c "set -euo pipefail; $(declare -p goroot gomodcache gocache environment); inside \"\$@\"" \
		bare "$work/root" "$@" &
	runner=$!
	wait "$runner" || status=$?
	runner=
	return $status
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
main "$@"
