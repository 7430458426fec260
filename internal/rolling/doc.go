// Package rolling tests that programs of an earlier version of the driver and of this one exclude each other on the same
// keys, as in a rolling upgrade, and that this version works beside the procedures that earlier ones made. The lock table
// and the names of named locks are all that versions agree on.
//
//	make rolling
//
// builds a program of an earlier version from the repository's history. In "make test" both programs are of this version,
// and the procedures of the earlier one come from testdata/procedures.sql, which its "mysqllock schema print" has written.
package rolling
