package server_test

import (
	"fmt"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/server"
)

// TestClusterErrors has what nodes of clusters answer that were refused, or do not
// know whether they were. The texts are the servers' own.
func TestClusterErrors(t *testing.T) {
	for _, test := range []struct {
		err                          mysql.MySQLError
		deadlock, undecided, refused bool
	}{
		{err: mysql.MySQLError{Number: 1213, Message: "Deadlock found when trying to get lock; try restarting transaction"}, deadlock: true},
		{err: mysql.MySQLError{Number: 3101, Message: "Plugin instructed the server to rollback the current transaction."}, deadlock: true},
		{err: mysql.MySQLError{Number: 1180, Message: "Got error 149 - 'Lock deadlock; Retry transaction' during COMMIT"}, deadlock: true},
		{err: mysql.MySQLError{Number: 1180, Message: "Error while appending streaming replication fragment(provider status: Not connected to Primary Component)"}, undecided: true},
		{err: mysql.MySQLError{Number: 3100, Message: "Error on observer while running replication hook 'before_commit'."}, undecided: true},
		{err: mysql.MySQLError{Number: 1047, Message: "WSREP has not yet prepared node for application use"}, refused: true},
		{err: mysql.MySQLError{Number: 1290, Message: "The MySQL server is running with the --super-read-only option so it cannot execute this statement"}, refused: true},
		{err: mysql.MySQLError{Number: 1205, Message: "Lock wait timeout exceeded; try restarting transaction"}},
	} {
		err := fmt.Errorf("locking: %w", &test.err)
		if server.Deadlock(err) != test.deadlock || server.Undecided(err) != test.undecided || server.Refused(err) != test.refused {
			t.Errorf("%v: deadlock %v, undecided %v, refused %v", err, server.Deadlock(err), server.Undecided(err), server.Refused(err))
		}
	}
}

func TestStreams(t *testing.T) {
	for _, test := range []struct {
		info server.Info
		want bool
	}{
		{server.Info{MariaDB: true, Version: "10.11.19-MariaDB", Topology: server.Galera}, true},
		{server.Info{MariaDB: true, Version: "10.4.2-MariaDB", Topology: server.Galera}, true},
		{server.Info{MariaDB: true, Version: "11.4.2-MariaDB", Topology: server.Galera}, true},
		{server.Info{MariaDB: true, Version: "10.3.39-MariaDB", Topology: server.Galera}, false},
		{server.Info{MariaDB: true, Version: "10.11.19-MariaDB"}, false},
		{server.Info{Version: "8.0.36-28.1", Topology: server.Galera}, false}, // Percona's
		{server.Info{Version: "9.7.4", Topology: server.MultiPrimary}, false},
	} {
		if got := test.info.Streams(); got != test.want {
			t.Errorf("%+v: %v", test.info, got)
		}
	}
}
