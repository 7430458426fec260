package schema_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

// procedure makes a procedure, with a comment, in the scratch database.
func (s *scratch) procedure(name, comment string) {
	s.T.Helper()
	s.Exec(s.open(), "CREATE PROCEDURE `"+s.Name+"`.`"+name+"`() COMMENT '"+comment+"' DO 0")
}

// procedures are the names of those in the scratch database.
func (s *scratch) procedures() (names []string) {
	s.T.Helper()
	for _, r := range s.Query(s.open(), "SELECT ROUTINE_NAME FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = '"+s.Name+"' ORDER BY 1") {
		names = append(names, r[0])
	}
	return names
}

// TestOnlyProceduresOfEarlierVersionsAreDropped: those of each version are, and told, and nothing that is someone
// else's, by its name or by its comment, or belongs to another lock table.
func TestOnlyProceduresOfEarlierVersionsAreDropped(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		old := strings.Fields("begin done1 done2 done3 give1 give2 give3 held1 held2 held3 lock1 lock2" +
			" named1 next1 next2 next3 pass1 seen1 seen2 take1 wait1 wait2")
		var want []string
		for _, end := range old {
			comment := "mysqllock"
			if end == "begin" {
				comment = "mysqllock 5"
			}
			s.procedure("locks_"+end, comment)
			want = append(want, fmt.Sprintf("`%s`.`locks_%s`", s.Name, end))
		}
		for _, name := range []string{"locks_lock", "locks_lock9", "locks_lock10", "locks_close1", "locks", "other_lock2", "my_locks_lock2", "locksXlock2"} {
			s.procedure(name, "mysqllock")
		}
		foreign := []string{"locks_done1", "locks_wait2"}
		for _, name := range foreign { // of our name
			s.Exec(c, "DROP PROCEDURE `"+s.Name+"`.`"+name+"`")
			s.procedure(name, "mysqllock of theirs")
			want = slices.DeleteFunc(want, func(w string) bool { return strings.HasSuffix(w, name+"`") })
		}
		before := s.procedures()
		found, err := s.table.OldProcedures(t.Context(), c)
		dbtest.OK(t, err)
		dropped, err := s.table.DropProcedures(t.Context(), c)
		dbtest.OK(t, err)
		for what, got := range map[string][]string{"found": found, "dropped": dropped} {
			if !slices.Equal(got, want) {
				t.Errorf("%s are %q, want %q", what, got, want)
			}
		}
		if left := len(before) - len(want); len(s.procedures()) != left {
			t.Errorf("left are %q, want %d", s.procedures(), left)
		}
		if again, err := s.table.DropProcedures(t.Context(), c); err != nil || len(again) > 0 {
			t.Errorf("again: %q, %v", again, err)
		}
	})
}

// TestAnAccountThatMayNotDropProceduresIsToldWhatItNeeds, and one that does not see them finds none.
func TestAnAccountThatMayNotDropProceduresIsToldWhatItNeeds(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.procedure("locks_lock2", "mysqllock")
		user := "u_" + s.Name[len(s.Name)-8:]
		root := s.open()
		s.Exec(root, "CREATE USER '"+user+"'@'%'")
		t.Cleanup(func() { s.Exec(root, "DROP USER '"+user+"'@'%'") })
		c := s.Connect(dbtest.NoDatabase, dbtest.As(user))
		if dropped, err := s.table.DropProcedures(t.Context(), c); err != nil || len(dropped) > 0 {
			t.Errorf("one that it does not see: %q, %v", dropped, err)
		}
		s.Exec(root, "GRANT EXECUTE ON "+s.Name+".* TO '"+user+"'@'%'")
		dropped, err := s.table.DropProcedures(t.Context(), c)
		if !server.Denied(err) || !strings.Contains(err.Error(), "needs ALTER ROUTINE") || len(dropped) > 0 {
			t.Errorf("without ALTER ROUTINE: %q, %v", dropped, err)
		}
		s.Exec(root, "GRANT ALTER ROUTINE ON "+s.Name+".* TO '"+user+"'@'%'")
		s.Exec(root, "DROP PROCEDURE "+s.Name+".locks_lock2") // which MySQL lets no account drop that may do less than its maker
		s.Exec(root, "CREATE DEFINER = '"+user+"'@'%' PROCEDURE "+s.Name+".locks_lock2() COMMENT 'mysqllock' DO 0")
		if dropped, err := s.table.DropProcedures(t.Context(), c); err != nil || len(dropped) != 1 {
			t.Errorf("with it: %q, %v", dropped, err)
		}
	})
}
