// Package chaos proves on real servers that two never hold a lock: processes that
// use the driver are killed, stopped and cut off, and so is their server, while
// they move money under locks of every strategy. What they believed and what is
// in the database is then checked as one history.
//
// The harness is in the tests; "make chaos" runs it for longer, and writes what it
// found to docs/reliability.md. In the environment,
//
//   - CHAOS_TIME is how long each server and cluster is tormented, "10m" for
//     instance; by default each fault comes once, on one of the servers, and there
//     are no clusters,
//   - CHAOS_SEED, a number, repeats the choice of faults, of their victims and
//     lengths, and of what the clients do. When things happen is up to the machine,
//   - CHAOS_PAGE is the page to write.
package chaos
