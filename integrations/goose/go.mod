module github.com/mysqllock/mysqllock/integrations/goose

go 1.26.0

replace github.com/mysqllock/mysqllock => ../..

require (
	github.com/mysqllock/mysqllock v0.1.0
	github.com/pressly/goose/v3 v3.27.3
)

require (
	filippo.io/edwards25519 v1.2.0 // indirect
	github.com/go-sql-driver/mysql v1.10.1 // indirect
	github.com/mfridman/interpolate v0.0.2 // indirect
	github.com/sethvargo/go-retry v0.4.0 // indirect
	go.uber.org/multierr v1.11.0 // indirect
	golang.org/x/sync v0.22.0 // indirect
)
