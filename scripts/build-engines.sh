#!/usr/bin/env bash
# Builds TiDB 8.5 and Vitess 24 from the Go module proxy into the user's cache, where the tests
# look for them. They take about 15 and 6 minutes of processor time, and 2 GB in the folder for
# temporary files meanwhile. What is there is not built again; with --look nothing is built, and
# the script says what is there. A name (tidb, vitess) has only that one built.
set -euo pipefail

cache=${XDG_CACHE_HOME:-$HOME/.cache}/mysqllock

# The module's version and that of its parser are one commit of TiDB's.
build_tidb() {
	local module=github.com/pingcap/tidb version=v1.1.0-beta.0.20241125141335-ec8b81b98edc
	local parser=v0.0.0-20241125141335-ec8b81b98edc
	copy "$module@$version"
	sed -i "s#$module/pkg/parser => ./pkg/parser#$module/pkg/parser => $module/pkg/parser $parser#" go.mod
	compile ./cmd/tidb-server "-X $module/pkg/parser/mysql.TiDBReleaseVersion=v8.5.0 -X $module/pkg/util/versioninfo.TiDBEdition=Community"
}

build_vitess() {
	copy vitess.io/vitess@v0.24.4
	compile ./go/cmd/vtcombo ""
}

# copy goes to a copy of a module's version, since the folder of modules is not to be changed.
copy() {
	go mod download "$1"
	cp -r "$(go env GOMODCACHE)/$1" "$work/source"
	chmod -R u+w "$work/source"
	cd "$work/source"
}

compile() {
	GOFLAGS=-mod=mod GOWORK=off go build -p 2 -o "$work/program" -ldflags "-s -w $2" "$1"
}

# engine looks for a program, as internal/tempserver/tidb.go and vitess.go call it, or builds it.
engine() {
	local name=$1 build=$2 program=$cache/$3
	if [ -x "$program" ]; then
		echo "build-engines: $name is built, and is tested on: $program"
	elif [ "$look" = yes ]; then
		echo "build-engines: no $name is built here (make engines), so nothing is tested on it"
	else
		echo "build-engines: building $name, which takes minutes"
		mkdir -p "$cache"
		(
			work=$(mktemp -d)
			trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT
			"$build"
			mv "$work/program" "$program.new"
			mv "$program.new" "$program" # in one step: what is there is complete
		)
		echo "build-engines: built $program"
	fi
}

look=no
[ "${1:-}" != --look ] || { look=yes && shift; }
case ${1:-all} in all | tidb) engine TiDB build_tidb tidb-server-8.5.0 ;; esac
case ${1:-all} in all | vitess) engine Vitess build_vitess vtcombo-24.0.4 ;; esac
