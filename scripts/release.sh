#!/usr/bin/env bash
# Releases all modules of this repository, each with a tag of its own on one commit.
#
#   scripts/release.sh v0.1.0           checks, and tries it as a user would; changes nothing
#   scripts/release.sh v0.1.0 --push    the same, then makes the tags and pushes them
#   scripts/release.sh v0.1.0 --check   asks the module proxy for what was released
#
# The trial takes the modules from the commit, through a module proxy of files. REMOTE is
# where tags go, by default origin; PROXY is what --check asks, by default
# https://proxy.golang.org.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?say which version, like v0.1.0} what=${2:-}
REMOTE=${REMOTE:-origin} PROXY=${PROXY:-https://proxy.golang.org}
root=github.com/mysqllock/mysqllock
private='^(bench|examples|tools|inspect/web/webtest)$' # modules that nobody imports

work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
wrong=0
say() { echo "release: $*"; }
fault() { say "$*" >&2; wrong=1; }

mapfile -t all < <(git ls-files 'go.mod' '*/go.mod' | grep -v /testdata/ | xargs -n 1 dirname | sort)
modules=()
for dir in "${all[@]}"; do [[ $dir =~ $private ]] || modules+=("$dir"); done
path() { if [ "$1" = . ]; then echo $root; else echo "$root/$1"; fi; }
tag() { if [ "$1" = . ]; then echo "$version"; else echo "$1/$version"; fi; }

# The import paths of the commands of a module: what "go install" is for.
commands() {
	local dir pkg
	git grep -l '^package main$' -- "$1/*.go" | grep -vE '/(internal|testdata)/|_test\.go$' | xargs -r -n 1 dirname | sort -u |
		while read -r dir; do
			pkg=$dir
			while [ ! -e "$pkg/go.mod" ] && [ "$pkg" != . ]; do pkg=$(dirname "$pkg"); done
			if [ "$pkg" = "$1" ]; then path "$dir"; fi
		done
}

checks() {
	local dir require
	[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || fault "$version is not a version like v0.1.0"
	[ -z "$(git status --porcelain)" ] || fault "there are changes that are not committed"
	grep -qE "^## \[${version#v}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
		fault "CHANGELOG.md has no heading '## [${version#v}] - date'; it is what stands under Unreleased"
	for dir in "${modules[@]}"; do
		[ "$(awk '$1 == "module" { print $2 }' "$dir/go.mod")" = "$(path "$dir")" ] || fault "$dir/go.mod is of another module"
		git rev-parse -q --verify "refs/tags/$(tag "$dir")" >/dev/null && fault "there is a tag $(tag "$dir")"
		require=$(cd "$dir" && GOWORK=off go mod edit -json | tr -d ' \t\n' | grep -oE "\"Path\":\"$root[a-z/]*\",\"Version\":\"[^\"]*\"" | sort -u || true)
		if [ -n "$require" ] && [ "$require" != "\"Path\":\"$root\",\"Version\":\"$version\"" ]; then
			fault "$dir/go.mod requires $require, not $version of $root only"
		fi
		if { [ "$dir" = . ] || [ -n "$(commands "$dir")" ]; } && grep -q '^replace' "$dir/go.mod"; then
			fault "$dir/go.mod has a replace, with which 'go install' refuses it"
		fi
	done
}

# Puts the modules of HEAD where GOPROXY=file://$work/proxy finds them.
pack() {
	local dir other at nested
	for dir in "${modules[@]}"; do
		at=$work/proxy/$(path "$dir")/@v
		mkdir -p "$at"
		nested=()
		while read -r other; do
			if [ "$other" != go.mod ]; then nested+=(":(exclude)$(dirname "$other")"); fi
		done < <(if [ "$dir" = . ]; then git ls-files 'go.mod' '*/go.mod'; else git ls-files "$dir" | sed -n "s|^$dir/\(.*go\.mod\)$|\1|p" | grep -E '(^|/)go\.mod$'; fi)
		git archive --format=zip --prefix="$(path "$dir")@$version/" -o "$at/$version.zip" "HEAD:${dir#.}" -- . "${nested[@]}"
		git show "HEAD:$([ "$dir" = . ] || echo "$dir/")go.mod" >"$at/$version.mod"
		echo "$version" >"$at/list"
		echo "{\"Version\":\"$version\",\"Time\":\"$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)\"}" >"$at/$version.info"
	done
}

# Asks for each module as a program of somebody else does, and installs the commands.
use() {
	local dir pkg
	export GOWORK=off GOFLAGS=-modcacherw GONOSUMDB=$root,$root/* GOBIN=$work/bin
	for dir in "${modules[@]}"; do
		mkdir -p "$work/user/$dir"
		(
			cd "$work/user/$dir" &&
			go mod init user.example/program &&
			go get "$(path "$dir")/...@$version" &&
			go list -deps "$(path "$dir")/..." >/dev/null
		) >"$work/output" 2>&1 || { cat "$work/output" >&2; fault "$(path "$dir")@$version is not to be had"; continue; }
		say "$(path "$dir")@$version can be imported"
		for pkg in $(commands "$dir"); do
			if (cd "$work" && go install "$pkg@$version") >"$work/output" 2>&1; then
				say "go install $pkg@$version"
			else
				cat "$work/output" >&2
				fault "go install $pkg@$version failed"
			fi
		done
	done
}

done_if_right() { if [ $wrong != 0 ]; then say "not released" >&2; exit 1; fi; }

if [ "$what" = --check ]; then
	GOPROXY=$PROXY use
	exit $wrong
fi
if [ -n "$what" ] && [ "$what" != --push ]; then
	say "what is $what?" >&2
	exit 2
fi
checks
done_if_right
pack
(
	cache=$(go env GOMODCACHE)/cache/download # what is there need not be loaded again
	export GOMODCACHE=$work/cache
	GOPROXY=file://$work/proxy,file://$cache,$(go env GOPROXY) use
	exit $wrong
) || wrong=1
done_if_right
tags=()
for dir in "${modules[@]}"; do tags+=("$(tag "$dir")"); done
if [ "$what" != --push ]; then
	say "all is well; --push would make and push: ${tags[*]}"
	exit
fi
for t in "${tags[@]}"; do git tag -a "$t" -m "$t"; done
git push --atomic "$REMOTE" "${tags[@]/#/refs/tags/}"
say "released; scripts/release.sh $version --check asks the proxy, which may need some minutes"
