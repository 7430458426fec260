package inspect_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"

	_ "github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/inspect"
)

func Example() {
	db, err := sql.Open("mysql", "app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	inspector, err := inspect.New(db, inspect.Options{})
	if err != nil {
		log.Fatal(err)
	}
	snapshot, err := inspector.Snapshot(context.Background(), inspect.Filter{})
	if err != nil {
		log.Fatal(err)
	}
	for _, lock := range snapshot.Locks {
		for _, holder := range lock.Holders.List {
			fmt.Println(lock.Key, "is held by", holder.Program, "and", lock.Waiters.Count(), "wait")
		}
	}
	for _, gap := range snapshot.Gaps {
		fmt.Println("not shown:", gap.What, "because", gap.Why)
	}
}
