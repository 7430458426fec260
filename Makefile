# "make help" lists what there is. Everything but "servers", "rivals" and "browser" works without root.

SHELL    := /bin/bash
MODULES  := $(patsubst %/go.mod,%,$(shell find . -name go.mod -not -path './tools/*' -not -path '*/testdata/*' | sort))
# $(call tool,name) is where a tool is: go does not run one of another go.mod in a
# workspace, which cmd/mysqllock has.
tool      = $(shell GOWORK=off go tool -modfile=$(CURDIR)/tools/go.mod -n $(1))
# $(call each,command) runs the command in every module, up to the first failure.
each      = @set -e; for module in $(MODULES); do echo "== $$module: $(1)"; (cd "$$module" && $(1)); done

.DEFAULT_GOAL := help
.PHONY: help servers rivals browser lint test demo storm hunt prove clusters chaos soak bench gobench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

servers: ## Install MariaDB and MySQL if they are missing (Debian or Ubuntu, as root)
	@scripts/install-servers.sh

rivals: ## Install Redis and etcd, which bench compares with, if they are missing (the same)
	@scripts/install-rivals.sh

browser: ## Install Chromium, which looks at the page of locks in its tests, if it is missing (the same)
	@scripts/install-chromium.sh

lint: ## Check format, and run golangci-lint, with vet and staticcheck in it, in every module
	@echo "== gofmt"; unformatted=$$(gofmt -l .) && [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	$(call each,$(call tool,golangci-lint) run ./...)

# The modules beside the driver's have one long package each, so two of them are
# tested at a time. What "go test" would vet is linted by then.
check = go test -race -vet=off -timeout 14m
test: servers rivals browser lint ## Lint, then run all tests with the race detector
	$(check) ./...
	@printf '%s\n' $(filter-out .,$(MODULES)) | xargs -P 2 -I {} sh -c 'echo "== {}" && cd {} && $(check) ./...'

demo: servers ## Show what goes wrong without locks, and right with them
	cd examples && go run ./oversold

storm: servers ## A longer storm of cancelled contexts and killed connections
	STORM_TIME=$${STORM_TIME:-60s} go test -race -count 1 -v -run TestStorm .

hunt: servers ## A longer hunt for deadlocks among random sets of keys
	HUNT_TIME=$${HUNT_TIME:-60s} go test -race -count 1 -v -timeout 60m -run TestHunt .

prove: servers ## The long form of the tests that prove the leases: some minutes
	PROVE=1 go test -race -count 1 -v -timeout 60m -run 'TestProof|TestOracle' .

clusters: servers ## What locks do on Galera and Group Replication, nodes that die, stop and are cut off included: minutes
	CLUSTERS=long go test -race -count 1 -v -timeout 20m ./internal/clusters

chaos: servers ## Kill, stop and cut off holders and servers, and check everything: minutes; writes docs/reliability.md
	CHAOS_TIME=$${CHAOS_TIME:-3m} CHAOS_PAGE=$(CURDIR)/docs/reliability.md go test -race -count 1 -v -timeout 0 ./internal/chaos

soak: servers ## 2,000 clients on 300 connections of each server: nothing hangs, grows or is lost
	SOAK_TIME=$${SOAK_TIME:-10m} go test -count 1 -v -timeout 120m -run TestSoak ./internal/soak

bench: servers rivals ## Compare with locks in Redis, etcd and plain SQL; writes docs/performance.md
	cd bench && go run .

gobench: servers ## Run the Go benchmarks of the driver alone
	go test -bench . -benchmem -run '^$$' .
