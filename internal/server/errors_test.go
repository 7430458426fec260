package server_test

import (
	"fmt"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/server"
)

// TestWhatErrorsMean has what nodes of clusters, and TiDB, answer that were refused, have ended the
// transaction or the connection, or do not know whether they have committed. The texts are the
// servers' own.
func TestWhatErrorsMean(t *testing.T) {
	type is struct{ deadlock, undecided, refused, changed, ends, gone, locked, interrupted bool }
	for _, test := range []struct {
		number uint16
		text   string
		is
	}{
		{1213, "Deadlock found when trying to get lock; try restarting transaction", is{deadlock: true, ends: true}},
		{3101, "Plugin instructed the server to rollback the current transaction.", is{deadlock: true, ends: true}},
		{1180, "Got error 149 - 'Lock deadlock; Retry transaction' during COMMIT", is{deadlock: true, ends: true}},
		{1180, "Error while appending streaming replication fragment(provider status: Not connected to Primary Component)", is{undecided: true, ends: true}},
		{3100, "Error on observer while running replication hook 'before_commit'.", is{undecided: true}},
		{1047, "WSREP has not yet prepared node for application use", is{refused: true}},
		{1290, "The MySQL server is running with the --super-read-only option so it cannot execute this statement", is{refused: true}},
		{1205, "Lock wait timeout exceeded; try restarting transaction", is{locked: true, interrupted: true}},
		// TiDB's. Of those at COMMIT only the last leaves open whether it came through.
		{9007, "Write conflict, txnStartTS=1, conflictStartTS=2, conflictCommitTS=3, key={}, originalKey=74, primary={}, reason=Optimistic [try again later]", is{deadlock: true, changed: true, ends: true}},
		{8005, "Write conflict, txnStartTS 1 is stale [try again later]", is{deadlock: true, changed: true, ends: true}},
		{8002, "[1] can not retry select for update statement", is{deadlock: true, ends: true}},
		{8022, "Error: KV error safe to retry Txn(Mvcc(TxnLockNotFound)) [try again later]", is{deadlock: true, ends: true}},
		{8028, "Information schema is changed during the execution of the statement [try again later]", is{deadlock: true, ends: true}},
		{8229, "TTL manager has timed out, pessimistic locks may expire, please commit or rollback this transaction", is{ends: true}},
		{8147, "transaction aborted because lazy uniqueness check is enabled and an error occurred: [kv:1062]Duplicate entry '1' for key 'c.PRIMARY'", is{ends: true}},
		{9005, "Region is unavailable", is{}},
		{1105, "[executor:1317]Query execution was interrupted", is{gone: true}},
		{1105, "[global:2]execution result undetermined", is{gone: true}},
	} {
		err := fmt.Errorf("locking: %w", &mysql.MySQLError{Number: test.number, Message: test.text})
		got := is{
			server.Deadlock(err), server.Undecided(err), server.Refused(err), server.Changed(err),
			server.Info{}.EndsTransaction(err), server.Gone(err, nil), server.Locked(err), server.Interrupted(err),
		}
		if got != test.is {
			t.Errorf("%v: got %+v, want %+v", err, got, test.is)
		}
	}
}

// A driver that does not say whether its connections are valid has lost the one on which it has panicked.
func TestAPanicIsALostConnection(t *testing.T) {
	lost := fmt.Errorf("locking: %w", &basedriver.Panic{Value: &mysql.MySQLError{Number: 1213}})
	if !server.Gone(lost, nil) || server.Deadlock(lost) {
		t.Error("it is not told as a lost connection")
	}
}

func TestGaleraStreamsInMariaDBFrom10_4Only(t *testing.T) {
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
