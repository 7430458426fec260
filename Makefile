# "make help" lists what there is. Everything but "bare", and what installs programs, works without root.

SHELL    := /bin/bash
MODULES  := $(patsubst %/go.mod,%,$(shell find . -name go.mod -not -path './tools/*' -not -path '*/testdata/*' | sort))
OTHERS   := $(filter-out .,$(patsubst ./%,%,$(MODULES)))
# $(call tool,name) is where a tool is: go does not run one of another go.mod in a
# workspace, which cmd/mysqllock has. Without the tool make stops: the line would run its
# next word as a command.
tool      = $(or $(shell GOWORK=off go tool -modfile=$(CURDIR)/tools/go.mod -n $(1)),$(error no $(1): go says above why))

.DEFAULT_GOAL := help
.PHONY: test-oldest oldest help installed servers engines rivals prometheus browser lint check test demo bare prove matrix random scene rolling storm hotkeys deadlocks onestatement leases leaders callers clusters chaos soak bench look ways gobench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

servers: ## Install the servers of the tests, MariaDB, MySQL and proxies, if they are missing (Debian or Ubuntu, as root)
	@scripts/install-servers.sh

engines: servers ## Build TiDB and Vitess once, into the user's cache, and run the tests on them: minutes; then "make test" runs them, too
	@scripts/build-engines.sh
	PROVE=1 go test -race -count 1 -v ./internal/tidb ./internal/vitess

rivals: ## Install Redis and etcd, which bench compares with, if they are missing (the same)
	@scripts/install-tools.sh redis etcd

prometheus: ## Install Prometheus, with promtool, which evaluates the dashboard and tests the alerts, if it is missing (the same)
	@scripts/install-tools.sh prometheus

browser: ## Install Chromium, which looks at the page of locks in its tests, if it is missing (the same)
	@scripts/install-chromium.sh

# All modules are one workspace for golangci-lint, which else looks at the standard library, the driver and what they share
# again in each: 28 s in place of 105 (measured).
lint: ## Check format and the workflows, and run golangci-lint, with vet and staticcheck in it, in every module
	@echo "== gofmt"; unformatted=$$(gofmt -l .) && [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	@echo "== actionlint"; $(call tool,actionlint) .github/workflows/*.yml
	@echo "== words"; MYSQLLOCK_TEST_SERVERS=0 go test $(RACE) -vet=off -run '^(TestRetiredWords|TestReceiversAreInitialsAndLinesAreShort|TestCommentsNameTheirSubject|TestErrorNumbersHaveNames)$$' .
	@echo "== golangci-lint"; dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && (cd "$$dir" && go work init $(MODULES:%=$(CURDIR)/%)) && \
	GOWORK="$$dir/go.work" GOFLAGS='$(shell go env GOFLAGS) $(RACE)' $(call tool,golangci-lint) run $(MODULES:%=%/...)

# The tests of tempserver are about servers, also those that run without one.
check: ## What needs no server, in under a minute: format, golangci-lint (with vet), and the tests that run without one
	@echo "== gofmt"; unformatted=$$(gofmt -l .) && [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	$(call tool,golangci-lint) run ./...
	MYSQLLOCK_TEST_SERVERS=0 go test -vet=off $$(go list ./... | grep -v /internal/tempserver$$)

# What the tests need is installed, one after the other, while lint runs, which needs none of it.
installed:
	@scripts/install-servers.sh
	@scripts/install-tools.sh redis etcd prometheus
	@scripts/install-chromium.sh
	@scripts/build-engines.sh --look

# Two packages are tested at a time on two processors: with three, or with lint beside
# them, servers that are loaded by one test may not answer another one in time. (Lint beside
# them at nice 19 on one processor saved two minutes, and a test failed so in each of three
# runs.) What "go test" would vet is linted by then. Lint looks at what the race detector's
# packages are, which the tests need as well. Nobody debugs these programs: linked without
# what a debugger needs, each takes a fifth less.
check  = go test -race -vet=off -ldflags=-w -timeout 14m
test: ## Lint, and run all tests with the race detector
	@$(MAKE) --no-print-directory --jobs 2 installed lint RACE=-race
	$(check) -p 2 ./...
	@$(MAKE) --no-print-directory --jobs 3 test-oldest $(OTHERS:%=test/%)

test/%:
	cd $* && $(check) ./...

# With the oldest Go that its go.mod allows, where the module proxy has it, the driver
# is built and vetted, and the matrix runs on one server, with statements one by one where they
# are several in a text elsewhere; "make oldest" has all tests that need no server, too: what tests say of
# servers does not depend on Go.
first  = go$(shell awk '$$1 == "go" { print $$2 }' go.mod)
# $(call onfirst,commands) runs them with that Go.
onfirst = @if GOTOOLCHAIN=$(first) go version; then echo "== with $(first)" && export GOTOOLCHAIN=$(first) && $(1); \
	else echo "== no $(first) to be had here, so nothing runs with it"; fi

test-oldest:
	$(call onfirst,go vet ./... && MYSQLLOCK_TEST_SERVERS=1 MATRIX_FORM=single go test -vet=off -timeout 14m -skip 'TestCommandsAreTheGoldenOnes|TestASQLConnSendsWhatASQLDBDoes' ./internal/matrix)

oldest: test-oldest ## What "make test" has with the oldest Go that go.mod allows, and with it all tests that need no server
	$(call onfirst,MYSQLLOCK_TEST_SERVERS=0 go test -vet=off $$(go list ./... | grep -vE '/internal/(matrix|tempserver)$$'))

demo: ## Show what goes wrong without locks, and right with them; installs MariaDB and MySQL if they are missing (the same)
	@scripts/install-servers.sh mariadb mysql
	cd examples && go run ./oversold

bare: ## Test and show it in a minimal Debian, with nothing but Go (as root); RELEASE=trixie makes it another
	CI=true scripts/bare.sh

prove: servers ## The tests of the root, of internal/unit and of leases in their long form: all combinations of what "make test" combines in pairs, and races for longer
	PROVE=1 go test -race -count 1 -timeout 60m . ./internal/unit ./internal/lease

matrix: servers ## Each strategy × way of use × server × kind of connection × fault: some 23,000 cells, of which "make test" runs 138; and the commands of all
	MATRIX=all go test -race -count 1 -timeout 120m -run 'TestMatrix|TestCommands' ./internal/matrix

random: servers ## 2,000 random programs on each kind of handle and server, or RANDOM_PROGRAMS of them from SEED on, which must see what they see on the plain driver; "make test" runs 20
	go test -race -count 1 -v -timeout 120m ./internal/parity -parity.programs=$${RANDOM_PROGRAMS:-2000} -parity.seed=$${SEED:-$$(date +%s)}

scene: servers ## What ls, show, the page, history and errors say of seven keys, for 75 seconds, and of holders in trouble, against the truth
	cd cmd/mysqllock && MYSQLLOCK_TEST_SCENE=$${SCENE_TIME:-75s} go test -race -count 1 -v -timeout 20m -run TestNoTool .

# The earlier version is of the repository's history: a checkout without it fails here.
rolling: servers ## Programs of an earlier version, OLD, and of this one sell side by side, each strategy, in both orders, with and without the procedures of the earlier one; in "make test" both are of this version
	dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && git archive -o "$$dir/old.tar" $${OLD:-36bc1b393220} && tar -x -C "$$dir" -f "$$dir/old.tar" && \
	mkdir -p "$$dir/internal/rolling" && cp internal/rolling/seller_test.go "$$dir/internal/rolling" && \
	(cd "$$dir" && go test -c -o old ./internal/rolling) && \
	PROVE=1 MYSQLLOCK_ROLLING_OLD="$$dir/old" go test -race -count 1 -v -timeout 60m ./internal/rolling

storm: servers ## A longer storm of cancelled contexts and killed connections
	STORM_TIME=$${STORM_TIME:-60s} go test -race -count 1 -v -run TestStorm ./internal/chaos

hotkeys: servers ## A longer storm of two processes on a few advisory keys, on three servers, with fewer connections than callers that wait
	HOTKEYS_TIME=$${HOTKEYS_TIME:-2m} go test -race -count 1 -v -timeout 0 -run TestHotKeys ./internal/chaos

deadlocks: servers ## A longer stress test for deadlocks among random sets of keys
	DEADLOCKS_TIME=$${DEADLOCKS_TIME:-60s} go test -race -count 1 -v -timeout 60m -run TestDeadlockStress ./internal/chaos

onestatement: servers ## Look for a text or an argument of a caller's that becomes two statements on a session, by fuzzing on each server; "make test" runs the known ones
	go test -run '^$$' -fuzz FuzzOneStatement -fuzztime $${FUZZ_TIME:-10m} -timeout 0 ./internal/unit

leases: servers ## Commit all the time under a lease that is renewed meanwhile, on three servers
	LEASE_TIME=$${LEASE_TIME:-10m} go test -race -count 1 -v -timeout 0 -run TestCommitsUnderLease ./internal/chaos

leaders: servers ## 200 changes of leader by stops, kills, freezes and cuts, on three servers: never two that write, and how long nobody leads
	LEADERS=$${LEADERS:-200} go test -race -count 1 -v -timeout 60m -run TestElection ./leader

callers: servers ## 10,000 callers wait for 100 keys with 50 connections, on three servers: what each costs, and whether all are served in turn
	CALLERS=$${CALLERS:-10000} go test -count 1 -v -timeout 30m -run TestMaxConnsManyCallers ./internal/chaos

clusters: servers ## What locks do on Galera and Group Replication, nodes that die, stop and are cut off included: minutes
	CLUSTERS=long go test -race -count 1 -v -timeout 20m ./internal/clusters

chaos: servers ## Kill, stop and cut off holders and servers, and check everything: minutes; writes docs/reliability/results.md
	CHAOS_TIME=$${CHAOS_TIME:-3m} CHAOS_PAGE=$(CURDIR)/docs/reliability/results.md go test -race -count 1 -v -timeout 0 -run 'TestChaos|TestClusters|TestTheChecksSeeWrongWays|TestScenarios' ./internal/chaos

soak: servers ## 2,000 clients on 300 connections of each server: nothing hangs, grows or is lost
	SOAK_TIME=$${SOAK_TIME:-10m} go test -count 1 -v -timeout 120m -run TestSoak ./internal/chaos

bench: servers rivals ## Compare with locks in Redis, etcd and plain SQL; writes docs/performance.md and docs/performance
	cd bench && go run .

look: servers ## What a look at 1,000 held keys and 5,000 waiters costs each server
	go test -run '^$$' -bench BenchmarkLook -benchtime 5x -timeout 20m ./inspect -look.keys=1000 -look.waiters=5000

ways: servers ## How many functions and files of the driver an operation enters, on a server of each kind
	dir=$$(mktemp -d) && GOCOVERDIR=$$dir go run -cover -covermode=atomic -coverpkg=./... ./internal/ways; status=$$?; rm -rf $$dir; exit $$status

gobench: servers ## Run the Go benchmarks of the driver alone
	go test -bench . -benchmem -run '^$$' .
