// Package hunt has the long random histories of the driver: callers of several processes
// take the same locks at random, while contexts are cancelled, connections killed,
// processes stopped, networks cut and servers crashed. What they had, and what is in the
// database, is then checked as one history.
//
// All of it is in the tests. Each has a short form, and a long one with a target of make:
// "make storm", "make hotkeys", "make hunt", "make leases", "make crowd" and "make prove".
package hunt
