package main

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestSchemaDropRefusesWhileALockIsHeld: the table is dropped only by who means it. Alone, since tests beside it hold
// advisory locks whose names do not tell the namespace.
func TestSchemaDropRefusesWhileALockIsHeld(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "drop", "-y").start().fails(1, "there is no table `"+s.Name+"`.`mysqllock`")
		s.command("schema", "apply").start().must(0)
		s.command("schema", "drop").start().fails(1, "give --yes")
		db := s.process("the holder")
		for strategy, option := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(),
		} {
			hold, err := mysqllock.Acquire(t.Context(), db, "k", option)
			dbtest.OK(t, err)
			says := map[string]string{"row": "locked by someone else", "lease": `the lease on "k"`, "advisory": `the advisory lock on "k"`}
			s.command("schema", "drop", "-y").start().fails(exitNotAcquired, says[strategy])
			s.command("schema", "check").start().must(0)
			dbtest.OK(t, hold.Release())
		}
		s.command("schema", "apply", "--table", "second").start().must(0)
		s.command("schema", "apply", "--table", "third").start().must(0)
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_take1() COMMENT 'mysqllock' DO 0")
		of := "`" + s.Name + "`."
		dbtest.Equal(t, "it says %s", s.command("schema", "drop", "-y").start().must(0), "dropped lock table "+of+"`mysqllock`\n"+
			"procedure "+of+"`mysqllock_take1` of an earlier version stays; to drop it: DROP PROCEDURE "+of+"`mysqllock_take1`\n"+
			"lock table "+of+"`second` stays\nlock table "+of+"`third` stays\n")
		dbtest.Equal(t, "there is %s", s.made(), "mysqllock_take1,second,third")
		var done jsonDropped
		s.command("schema", "drop", "-y", "--json", "--table", "second").read(&done)
		if done.Dropped != of+"`second`" || len(done.Tables) != 1 || len(done.Procedures) != 0 || done.Unseen != "" {
			t.Errorf("it says %+v", done)
		}
	})
}
