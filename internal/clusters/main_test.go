//go:build unix

// Package clusters has the tests of the driver on Galera and Group Replication:
// what each strategy does on each topology, and what becomes of it when a node
// does not go on. CLUSTERS=long has all of them; else the slow ones are left
// out.
package clusters

import (
	"crypto/rand"
	"database/sql"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	_ "github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // lost connections are what it is about
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // nearly all of the time goes by in waiting
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// long reports whether there is time for all tests.
func long() bool { return os.Getenv("CLUSTERS") == "long" }

// cluster is a cluster with what a test asks of it.
type cluster struct {
	*tempserver.Cluster
	topology tempserver.Topology
}

// often is how often something is done: as often as there is time for.
func often(short, much int) int {
	if long() {
		return much
	}
	return short
}

// start starts a cluster for a test.
func start(t *testing.T, topology tempserver.Topology) *cluster {
	t.Helper()
	tempserver.RequireCluster(t, topology)
	began := time.Now()
	c, err := tempserver.StartCluster(t.Context(), topology)
	dbtest.OK(t, err)
	t.Cleanup(func() { dbtest.OK(t, c.Stop()) })
	t.Logf("%s started in %v", topology, time.Since(began).Round(time.Millisecond))
	return &cluster{c, topology}
}

// scratch is a database of one test on a cluster, with a table p (id, stock).
type scratch struct {
	*testing.T
	*cluster
	database string
	plain    []*sql.DB // of each node, with the driver "mysql"
}

func (c *cluster) scratch(t *testing.T) *scratch {
	t.Helper()
	s := &scratch{T: t, cluster: c, database: "t_" + strings.ToLower(rand.Text())}
	for i := range c.Nodes {
		s.plain = append(s.plain, dbtest.Open(s, "mysql", s.DSN(i, "")+"?timeout=5s"))
	}
	primary := s.plain[s.primary()]
	dbtest.Exec(s, primary, "CREATE DATABASE "+s.database)
	dbtest.Exec(s, primary, "CREATE TABLE "+s.database+".p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(s, primary, "INSERT INTO "+s.database+".p VALUES (1, 0), (2, 0), (3, 0), (4, 0)")
	for i := range c.Nodes {
		s.wantStock(i, 3, 0)
	}
	return s
}

// open opens the scratch database on a node with the driver under test. params
// are added to the DSN, such as "lockWait=1s".
func (s *scratch) open(node int, params ...string) *sql.DB {
	return dbtest.Open(s, "mysqllock", s.DSN(node, s.database)+"?timeout=5s&"+strings.Join(params, "&"))
}

// wantStock waits until the node says what is wanted.
func (s *scratch) wantStock(node, id, want int) {
	s.Helper()
	dbtest.Eventually(s, fmt.Sprintf("node %d has stock %d", node, want), func() error {
		var got int
		err := s.plain[node].QueryRowContext(s.Context(), "SELECT stock FROM "+s.database+".p WHERE id = ?", id).Scan(&got)
		if err == nil && got != want {
			err = fmt.Errorf("it has %d", got)
		}
		return err
	})
}

// writers are the nodes that take writes.
func (s *scratch) writers() []int {
	if s.topology == tempserver.GroupSinglePrimary {
		return []int{s.primary()}
	}
	return []int{0, 1, 2}
}
