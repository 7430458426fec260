# "make help" lists what there is. Everything but "servers" and "rivals" works without root.

SHELL    := /bin/bash
MODULES  := $(patsubst %/go.mod,%,$(shell find . -name go.mod -not -path './tools/*' -not -path '*/testdata/*' | sort))
TOOL     := go tool -modfile=$(CURDIR)/tools/go.mod
# $(call each,command) runs the command in every module, up to the first failure.
each      = @set -e; for module in $(MODULES); do echo "== $$module: $(1)"; (cd "$$module" && $(1)); done

.DEFAULT_GOAL := help
.PHONY: help servers rivals lint test demo storm hunt prove bench gobench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

servers: ## Install MariaDB and MySQL if they are missing (Debian or Ubuntu, as root)
	@scripts/install-servers.sh

rivals: ## Install Redis and etcd, which bench compares with, if they are missing (the same)
	@scripts/install-rivals.sh

lint: ## Check format, vet, staticcheck and golangci-lint in every module
	@echo "== gofmt"; unformatted=$$(gofmt -l .) && [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	$(call each,go vet ./...)
	$(call each,$(TOOL) staticcheck ./...)
	$(call each,$(TOOL) golangci-lint run ./...)

test: servers rivals lint ## Lint, then run all tests with the race detector
	$(call each,go test -race -timeout 14m ./...)

demo: servers ## Show what goes wrong without locks, and right with them
	cd examples && go run ./oversold

storm: servers ## A longer storm of cancelled contexts and killed connections
	STORM_TIME=$${STORM_TIME:-60s} go test -race -count 1 -v -run TestStorm .

hunt: servers ## A longer hunt for deadlocks among random sets of keys
	HUNT_TIME=$${HUNT_TIME:-60s} go test -race -count 1 -v -timeout 60m -run TestHunt .

prove: servers ## The long form of the tests that prove the leases: some minutes
	PROVE=1 go test -race -count 1 -v -timeout 60m -run 'TestProof|TestOracle' .

bench: servers rivals ## Compare with locks in Redis, etcd and plain SQL; writes docs/performance.md
	cd bench && go run .

gobench: servers ## Run the Go benchmarks of the driver alone
	go test -bench . -benchmem -run '^$$' .
