// Package chaos asks one question of the driver on real servers, in many scenarios: callers
// work under locks while things go wrong; was what happened right? Two never hold a lock, no
// update is lost, what a caller was told is what is committed, nothing hangs, and nothing is
// left.
//
// All of it is in the tests. Its parts are
//
//   - clients (client_test.go, jobs_test.go): processes whose workers do jobs, in each of the
//     ways in which an application locks. They write down what they did and believed,
//   - faults (faults_test.go): what is killed, stopped, cut off and set meanwhile,
//   - the arena (arena_test.go): a server or a cluster, with the clients of one round,
//   - the check (history_test.go, books_test.go): what all clients wrote down, and what is in
//     the database, as one history.
//
// The scenarios are short in every run of the tests. What makes them longer is a target of
// make, and a variable:
//
//   - "make chaos": each fault on each server and cluster, for CHAOS_TIME. By default each
//     fault comes once, on one of the servers, and there are no clusters. CHAOS_PAGE is the
//     page to write, docs/reliability/results.md,
//   - "make storm", "make hotkeys" and "make soak": very many callers with few connections, for
//     STORM_TIME, HOTKEYS_TIME and SOAK_TIME,
//   - "make deadlocks": random sets of keys, for DEADLOCKS_TIME; "make leases": commits under one lease,
//     for LEASE_TIME; "make callers": CALLERS callers.
//
// CHAOS_SEED, a number, repeats the choice of faults, of their victims and lengths, and of
// what the clients do. When things happen is up to the machine.
package chaos
