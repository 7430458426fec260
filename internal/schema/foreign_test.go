package schema_test

import (
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestForeignProcedures: a procedure of the name that other versions use, and one of our
// name that is somebody else's, are neither called nor removed.
func TestForeignProcedures(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		if s.info.MariaDB {
			return // which needs none
		}
		c := s.open()
		s.setup(c)
		const says = "(p_namespace VARBINARY(255), p_name VARBINARY(255), p_shared BOOL, p_quiet BIGINT UNSIGNED, p_seconds INT UNSIGNED, p_level INT, p_reads BOOL) COMMENT 'mysqllock 6' DO 0"
		make := func(name string) { s.Exec(c, "CREATE PROCEDURE "+name+says) }
		older := strings.Replace(s.table.LockProcedure().String(), "_lock2`", "_begin`", 1)
		if older == s.table.LockProcedure().String() {
			t.Fatal("it has the name that older versions use")
		}
		make(older)
		for _, foreign := range []bool{false, true} {
			s.Exec(c, "DROP PROCEDURE IF EXISTS "+s.table.LockProcedure().String())
			if foreign {
				make(s.table.LockProcedure().String())
			}
			procedure, err := s.table.Ensure(t.Context(), c, s.info, true)
			dbtest.OK(t, err)
			if procedure == foreign {
				t.Errorf("with a foreign one %v it is to be called: %v", foreign, procedure)
			}
			s.Exec(c, "CALL "+older+"('app', 'k', FALSE, NULL, 0, 0, FALSE)")
			if foreign {
				s.Exec(c, "CALL "+s.table.LockProcedure().String()+"('app', 'k', FALSE, NULL, 0, 0, FALSE)")
			}
		}
		for _, p := range s.table.Procedures() {
			s.Exec(c, "DROP PROCEDURE IF EXISTS "+p.String())
			for _, foreign := range []bool{false, false, true} { // made, found, and somebody else's
				if foreign {
					s.Exec(c, "DROP PROCEDURE "+p.String())
					make(p.String())
				}
				there, err := p.Provide(t.Context(), c, true)
				dbtest.OK(t, err)
				if there == foreign {
					t.Errorf("%s, foreign %v, is to be called: %v", p, foreign, there)
				}
			}
		}
	})
}
